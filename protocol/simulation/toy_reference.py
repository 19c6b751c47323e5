"""What one computer would have computed with the toy model: the law's right-hand side.

It shares the toy's formulas with the stages and none of their bookkeeping.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from protocol.manifest import Manifest
from protocol.ports import Tensor
from protocol.simulation import toy_math
from protocol.simulation.counted_stage import CountedState, first_state, next_state


@dataclass(frozen=True)
class ReferenceStep:
    """The loss of every slot, and the digest of every stage's state after the step."""

    losses: dict[int, float]
    digests: tuple[str, ...]


def run_reference(manifest: Manifest, committed: Iterable[Collection[int]]) -> list[ReferenceStep]:
    """Train from step 0 on the slots that counted in each step."""
    states = [
        first_state(stage, toy_math.initial_weights(manifest, stage))
        for stage in range(manifest.num_stages + 1)
    ]
    steps = []
    for step, slots in enumerate(committed):
        done = {slot: _microbatch(manifest, states, step, slot) for slot in sorted(slots)}
        counts_Q = torch.zeros(manifest.training.quota, dtype=torch.float64)
        counts_Q[list(done)] = 1
        for stage, state in enumerate(states):
            total_P = torch.stack([gradients[stage] for _, gradients in done.values()]).sum(0)
            states[stage] = next_state(manifest, state, torch.cat((total_P, counts_Q)), len(done))
        losses = {slot: loss for slot, (loss, _) in done.items()}
        steps.append(ReferenceStep(losses, tuple(state.digest() for state in states)))
    return steps


def _microbatch(
    manifest: Manifest, states: list[CountedState], step: int, slot: int
) -> tuple[float, list[Tensor]]:
    """Return the loss and the weight gradient of every stage; fp32 at the boundaries."""
    x_BTC, target_BTC = toy_math.draw(manifest, step, slot)
    inputs = [_crossed(toy_math.embed(states[0].weights_P, x_BTC))]
    for state in states[1:]:
        inputs.append(_crossed(toy_math.block_forward(state.weights_P, inputs[-1])))
    loss, g_BTC, by_head_C = toy_math.head(states[0].weights_P, inputs[-1], target_BTC)
    gradients: list[Tensor] = []
    for state, x in zip(reversed(states[1:]), reversed(inputs[:-1]), strict=True):
        g_BTC, by_weights_P = toy_math.block_backward(state.weights_P, x, _crossed(g_BTC))
        gradients.insert(0, toy_math.on_grid(by_weights_P))
    by_embedding_C = toy_math.embed_backward(x_BTC, _crossed(g_BTC))
    edge_P = toy_math.on_grid(torch.cat((by_embedding_C, by_head_C)))
    return loss, [edge_P, *gradients]


def _crossed(x_BTC: Tensor) -> Tensor:
    """Return what is left of a tensor after it crossed a boundary in fp32."""
    return x_BTC.float().double()
