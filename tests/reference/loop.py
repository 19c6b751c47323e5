"""The plain training loop: one process, one model, one sum of gradients per step.

A step takes the microbatches that the log names, averages the gradients of their mean losses,
clips each stage's part by its own norm, and steps the optimiser. The log says who drew what, so
that a run in which a data node died can be replayed exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reference.model import EMBEDDING, HEAD, Shape, Tensor, Weights, mean_loss

Table = Mapping[str, Any]
Draw = Callable[[str, int, int], Tensor]
"""(data node, step, slot) -> window of tokens [B, T + 1]."""


LR_SCALE = 1.1  # of a rebuilt stage


@dataclass(frozen=True)
class LoggedStep:
    """The committed microbatches of one step: (data node, slot)."""

    step: int
    entries: tuple[tuple[str, int], ...]


@dataclass
class Outcome:
    """What a run leaves: the mean loss of each step and the final weights."""

    losses: dict[int, float] = field(default_factory=dict)
    weights: Weights = field(default_factory=dict)


def layers_per_stage(stages: int | Sequence[int], layers: int) -> list[int]:
    """How many layers each stage 1..S holds; a number means that many equal stages."""
    if not isinstance(stages, int):
        return list(stages)
    return [layers // stages] * stages


def stage_parameters(names: Iterable[str], split: Sequence[int]) -> list[list[str]]:
    """Parameter names of stages 0..S: embedding and head, then the layers by ``split``."""
    owner = [stage for stage, count in enumerate(split, start=1) for _ in range(count)]
    groups: list[list[str]] = [[] for _ in range(len(split) + 1)]
    for name in names:
        stage = 0 if name in (EMBEDDING, HEAD) else owner[int(name.split(".")[2])]
        groups[stage].append(name)
    return groups


def clip_(gradients: Sequence[Tensor], limit: float) -> float:
    """Scale the gradients in place so that their joint norm is at most ``limit`` (0: no limit)."""
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    if limit and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))
    return norm


class Optimizer:
    """AdamW with decoupled decay, or SGD with momentum and the decay in its gradient."""

    def __init__(self, settings: Table, weights: Weights) -> None:
        self.settings = settings
        self.first = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.second = {name: torch.zeros_like(w) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, weights: Weights, gradients: Weights, rate: float, count: int) -> None:
        """Change ``weights`` in place; ``count`` is 1 at the first step."""
        change = {"adamw": self._adamw, "sgd": self._sgd}[self.settings["name"]]
        for name, weight in weights.items():
            weight.sub_(rate * change(name, weight, gradients[name], count))

    def _adamw(self, name: str, weight: Tensor, gradient: Tensor, count: int) -> Tensor:
        beta1, beta2 = self.settings["beta1"], self.settings["beta2"]
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient.square()
        mean = self.first[name] / (1 - beta1**count)
        spread = (self.second[name] / (1 - beta2**count)).sqrt()
        decay = self.settings["weight_decay"] * weight
        return mean / (spread + self.settings["epsilon"]) + decay

    def _sgd(self, name: str, weight: Tensor, gradient: Tensor, count: int) -> Tensor:
        decayed = gradient + self.settings["weight_decay"] * weight
        self.first[name] = self.settings["momentum"] * self.first[name] + decayed
        return self.first[name]


def learning_rate(training: Table, step: int) -> float:
    """The rate of ``step`` (from 0): linear warm-up, then constant, cosine or linear decay."""
    peak, schedule = training["optimizer"]["learning_rate"], training["schedule"]
    warmup, kind, final = (schedule[k] for k in ("warmup_steps", "kind", "final_fraction"))
    if step < warmup:
        return peak * (step + 1) / warmup
    if kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, training["steps"] - warmup))
    height = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress}[kind]
    return peak * (final + (1 - final) * height)


def step_gradients(weights: Weights, windows: Sequence[Tensor], shape: Shape) -> tuple:
    """Mean loss over the microbatches, and the mean of their gradients by name."""
    for weight in weights.values():
        weight.requires_grad_().grad = None
    losses = []
    for window_BU in windows:
        loss = mean_loss(weights, window_BU, shape)
        loss.backward()
        losses.append(loss.item())
    gradients = {name: w.grad / len(windows) for name, w in weights.items()}
    return math.fsum(losses) / len(losses), gradients


class Rebuilding:
    """Stages that were lost and made of their neighbours at the start of a step (CheckFree).

    ``rebuilt`` names the stage by step. Each neighbour weighs by the square of its gradient's norm
    in the step before; the optimiser starts anew, and the rate is scaled from then on.
    """

    def __init__(self, stages: Sequence[Sequence[str]], rebuilt: Mapping[int, int]) -> None:
        self._stages, self._rebuilt = stages, rebuilt
        self.norms = [0.0] * len(stages)
        self._scales, self._since = [1.0] * len(stages), [0] * len(stages)

    @torch.no_grad()
    def before(self, step: int, weights: Weights, optimizer: Optimizer, scale: float) -> None:
        """Rebuild what is lost at this step."""
        stage = self._rebuilt.get(step)
        if stage is None:
            return
        below, above = (self.norms[k] ** 2 for k in (stage - 1, stage + 1))
        names = zip(*(self._stages[k] for k in (stage, stage - 1, stage + 1)), strict=True)
        for name, lower, upper in names:
            mean = (below * weights[lower] + above * weights[upper]) / (below + above)
            weights[name].copy_(mean)
            optimizer.first[name].zero_()
            optimizer.second[name].zero_()
        self._scales[stage], self._since[stage] = scale, step

    def course(self, stage: int, rate: float, count: int) -> tuple[float, int]:
        """The stage's rate, and which step of its optimiser this is."""
        return rate * self._scales[stage], count - self._since[stage]


def run(
    manifest: Table,
    weights: Weights,
    log: Iterable[LoggedStep],
    draw: Draw,
    rebuilt: Mapping[int, int] | None = None,
) -> Outcome:
    """Train ``weights`` (changed in place) through the logged steps; see ``Rebuilding``."""
    training: Table = manifest["training"]
    shape = Shape.of(manifest["model"])
    split = layers_per_stage(manifest["pipeline"]["stages"], shape.layers)
    stages = stage_parameters(weights, split)
    optimizer = Optimizer(training["optimizer"], weights)
    outcome = Outcome(weights=weights)
    rebuilding = Rebuilding(stages, rebuilt or {})
    for done, logged in enumerate(log):
        rebuilding.before(logged.step, weights, optimizer, LR_SCALE)
        windows = [draw(node, logged.step, slot) for node, slot in logged.entries]
        outcome.losses[logged.step], gradients = step_gradients(weights, windows, shape)
        for stage, names in enumerate(stages):
            clip = training["clip_norm"]
            rebuilding.norms[stage] = clip_([gradients[name] for name in names], clip)
            rate = learning_rate(training, logged.step)
            of_stage = {name: weights[name] for name in names}
            optimizer.step(of_stage, gradients, *rebuilding.course(stage, rate, done + 1))
    for weight in weights.values():
        weight.requires_grad_(False).grad = None
    return outcome
