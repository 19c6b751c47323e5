"""A small swarm in one process whose stages can be lost, for ``benchmarks/recovery.py``.

The stages, their optimiser, the order of the stages, the choice of what a lost stage is rebuilt
from, and the mixing are the daemon's own code; the network and the replicas are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from protocol.keys import NodeKey
from protocol.manifest import Manifest, RecoverySpec
from protocol.recovery import (
    Average,
    CopyTwin,
    Holding,
    Refuse,
    Situation,
    plan,
    stage_order,
    weight_above,
)
from stages import Corpus, TorchBlockStage, TorchEdgeStage, make_tokenizer
from stages.initialisation import fill_initial
from stages.layout import stage_layout
from stages.recovery import Fetched, read_weights, rebuilt_weights

STAGES, WIDTH, CONTEXT, ROWS, QUOTA = 6, 32, 24, 16, 2
LEARNING_RATE, WARMUP_STEPS = 1e-2, 20
# Matrices of so small a width begin next to nothing under the usual 0.02, and stages would stay so.
INITIAL_SCALE = 5.0
WORDS, FOLLOWERS, DOCUMENTS, DOCUMENT_WORDS = 300, 4, 300, 600
Weights = list[torch.Tensor]  # of stage 0, 1, ..., S


def text(num_documents: int = DOCUMENTS) -> list[bytes]:
    """Sentences of made-up words: each word has four that follow it, the first most often."""
    rng = np.random.default_rng(1)
    words = [bytes(rng.integers(97, 123, rng.integers(3, 8)).tolist()) for _ in range(WORDS)]
    follow = rng.integers(0, WORDS, (WORDS, FOLLOWERS))
    documents = []
    for _ in range(num_documents):
        word = int(rng.integers(WORDS))
        said = []
        for choice in np.minimum(FOLLOWERS, rng.geometric(0.5, DOCUMENT_WORDS)) - 1:
            said.append(words[word])
            word = int(follow[word, choice])
        documents.append(b" ".join(said))
    return documents


def manifest_of(seed: int, steps: int, recovery: RecoverySpec) -> Manifest:
    """The small model: one layer per stage, byte tokens."""
    return Manifest.model_validate({
        "name": "recovery",
        "organiser": NodeKey(bytes(32)).peer_id,
        "model": {
            "layers": STAGES, "width": WIDTH, "heads": 4, "kv_heads": 2,
            "feed_forward": 2 * WIDTH, "vocabulary": 257, "context": CONTEXT,
        },
        "pipeline": {"stages": STAGES},
        "training": {
            "steps": steps, "quota": QUOTA, "microbatch": ROWS, "clip_norm": 1.0, "seed": seed,
            "optimizer": {
                "learning_rate": LEARNING_RATE, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0,
            },
            "schedule": {"warmup_steps": WARMUP_STEPS},
        },
        "data": {"seed": seed},
        "recovery": recovery.model_dump(),
    })  # fmt: skip


class Windows:
    """The corpus from one of its steps on, with validation in few large microbatches."""

    def __init__(self, manifest: Manifest, documents: Sequence[bytes], first_step: int) -> None:
        self._first_step = first_step
        self._corpus = Corpus(documents, make_tokenizer(manifest.model), manifest)

    def draw(self, step: int, slot: int) -> torch.Tensor:
        """Return a training microbatch."""
        return self._corpus.draw(self._first_step + step, slot)

    def validation(self, index: int) -> torch.Tensor:
        """Return eight consecutive held-out microbatches as one."""
        return torch.cat([self._corpus.validation(8 * index + part) for part in range(8)])


@dataclass
class Swarm:
    """One holder per stage, all in one process."""

    manifest: Manifest
    documents: Sequence[bytes]
    first_step: int = 0  # of the corpus
    spent_s: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "step": 0.0})

    def __post_init__(self) -> None:
        stages = range(1, self.manifest.num_stages + 1)
        windows = Windows(self.manifest, self.documents, self.first_step)
        self.edge = TorchEdgeStage(self.manifest, windows)
        self.blocks = {k: TorchBlockStage(self.manifest, k) for k in stages}

    @property
    def everyone(self) -> list[TorchEdgeStage | TorchBlockStage]:
        """All stages, stage 0 first."""
        return [self.edge, *self.blocks.values()]

    def weights(self) -> Weights:
        """A copy of all weights."""
        return [self.flat(k).clone() for k in range(self.manifest.num_stages + 1)]

    def begin(self, weights: Weights) -> None:
        """Put all stages at step 0 with these weights."""
        for stage, flat in zip(self.everyone, weights, strict=True):
            stage.rebuild(flat, 0, 1.0)

    def step(self) -> None:
        """Train one step, each slot in its order."""
        started = time.process_time()
        step = self.edge.step
        for slot in range(self.manifest.training.quota):
            self._microbatch(step, slot)
        for stage in self.everyone:
            stage.prepare(stage.gradient(["all"]), self.manifest.training.quota)
        for stage in self.everyone:
            stage.apply()
        self.spent_s["step"] += time.process_time() - started

    def _microbatch(self, step: int, slot: int) -> None:
        key = (step, slot)
        order = stage_order(self.manifest.recovery, self.manifest.num_stages, slot)
        h_BTW = self.edge.embed(key, step, slot)
        started = time.process_time()
        for k in order:
            h_BTW = self.blocks[k].forward(key, h_BTW, keep=True)
        self.spent_s["forward"] += time.process_time() - started
        _, g_BTW = self.edge.loss_and_gradient(key, h_BTW)
        for k in reversed(order):
            g_BTW = self.blocks[k].backward(key, g_BTW)
        self.edge.embed_backward(key, g_BTW)
        for stage in self.everyone:
            stage.commit(key, "all")

    def loss(self, num_microbatches: int = 1, without: int | None = None) -> float:
        """The held-out loss, in plain order; ``without`` passes one stage by."""
        order = stage_order(self.manifest.recovery, self.manifest.num_stages)
        total = 0.0
        for index in range(num_microbatches):
            h_BTW = self.edge.embed_validation("held out", index)
            for k in order:
                if k != without:
                    h_BTW = self.blocks[k].forward("held out", h_BTW, keep=False)
            total += self.edge.loss("held out", h_BTW)
        return total / num_microbatches

    def flat(self, stage: int) -> torch.Tensor:
        """The weights of a stage in a row, as whoever fetches its state gets them."""
        return self.fetched(stage).weights

    def fetched(self, stage: int) -> Fetched:
        """What somebody who rebuilds a stage reads of another one."""
        view = self.everyone[stage].view_state()
        assert view is not None
        _, digest, pieces = view
        return read_weights(self.manifest, stage, digest, pieces)


Rebuild = Callable[[Swarm, int, int], None]


def rebuild_by_plan(swarm: Swarm, stage: int, _number: int) -> None:
    """What the daemon does: plan, fetch, mix, begin with a fresh optimiser."""
    recovery, step = swarm.manifest.recovery, swarm.edge.step
    living = {k: [Holding(f"node-{k}", () if k == stage else (step,))] for k in swarm.blocks}
    chosen = plan(Situation(recovery, swarm.manifest.num_stages, living), stage)
    if isinstance(chosen, Average):
        sources = [swarm.fetched(chosen.below), swarm.fetched(chosen.above)]
    elif isinstance(chosen, CopyTwin):
        sources = [swarm.fetched(chosen.twin)]
    else:
        assert isinstance(chosen, Refuse), chosen
        raise ValueError(chosen.reason)
    norms = [source.gradient_norm for source in sources]
    share = weight_above(norms[0], norms[-1], recovery.omega_mode)
    weights = rebuilt_weights(swarm.manifest, stage, sources, share)
    swarm.blocks[stage].rebuild(weights, step, recovery.lr_scale)


def rebuild_at_random(swarm: Swarm, stage: int, number: int) -> None:
    """Begin the stage as a swarm begins, with other numbers each time."""
    weights = initial(swarm.manifest, stage, swarm.manifest.training.seed + 1000 * (number + 1))
    swarm.blocks[stage].rebuild(weights, swarm.edge.step, swarm.manifest.recovery.lr_scale)


def copy_neighbour(swarm: Swarm, stage: int, _number: int) -> None:
    """Take the weights of the stage below; of the one above for the first."""
    weights = swarm.flat(stage - 1 or 2)
    swarm.blocks[stage].rebuild(weights, swarm.edge.step, swarm.manifest.recovery.lr_scale)


def copy_at_the_ends(swarm: Swarm, stage: int, number: int) -> None:
    """CheckFree inside; the ends take their neighbour's weights, without having swapped."""
    is_end = stage in (1, swarm.manifest.num_stages)
    (copy_neighbour if is_end else rebuild_by_plan)(swarm, stage, number)


def forget_moments(swarm: Swarm, stage: int, _number: int) -> None:
    """Keep the weights and begin the optimiser anew: the least that a loss can cost."""
    swarm.blocks[stage].rebuild(swarm.flat(stage), swarm.edge.step, 1.0)


def initial(manifest: Manifest, stage: int, seed: int) -> torch.Tensor:
    """The weights with which a stage begins."""
    layout = stage_layout(manifest, stage)
    flat = torch.zeros(layout.num_elements)
    fill_initial(flat, layout, seed, manifest.model.layers)
    return flat.mul_(INITIAL_SCALE)


def deletion_costs(swarm: Swarm, num_microbatches: int) -> list[float]:
    """By how much the held-out loss rises without each stage, in nats."""
    whole = swarm.loss(num_microbatches)
    return [swarm.loss(num_microbatches, without=k) - whole for k in swarm.blocks]


def plain(value: Any) -> Any:
    """Numbers rounded to what is worth keeping in a log."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value
