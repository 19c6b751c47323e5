"""Kills holders of the demo's swarm, starts new ones, and tells what became of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.local_swarm import LocalSwarm
    from node.status import NodeStatus

CHAOS_STAGES = 5
LEAST_FOR_REBUILDING = 3  # an end has one neighbour only
_ALL_OF_A_STAGE = 0.25  # of the kills, where the stage can be rebuilt


@dataclass
class Loss:
    """Holders of a stage that were killed while a step ran, and how the stage was healed."""

    step: int
    stage: int
    names: tuple[str, ...]
    others: frozenset[str]  # who served the stage besides them
    was_last: bool
    healed: str = ""
    at: float = field(default_factory=time.monotonic)
    _told: int = 0

    def untold(self) -> Iterator[str]:
        """Yield what is new since the last call, a line each."""
        lines = [f"killed {', '.join(self.names)} of stage {self.stage} in step {self.step + 1}"]
        if self.healed:
            lines.append(f"stage {self.stage}: {self.healed}")
        yield from lines[self._told :]
        self._told = len(lines)


class Chaos:
    """In a share of the steps, drawn from ``seed``, it strikes; with 0 it never does."""

    def __init__(self, swarm: LocalSwarm, share: float, seed: int) -> None:
        self._swarm, self._share = swarm, share
        self._random = Random(f"chaos {seed}")  # noqa: S311 - a demo, no secret
        self.losses: list[Loss] = []

    def look(
        self,
        nodes: Sequence[tuple[str, NodeStatus | None]],
        fresh_steps: Sequence[int],
        *,
        is_over: bool,
    ) -> None:
        """See who is there after some steps have ended; perhaps strike in the one that runs."""
        serving = {
            name: status.stage
            for name, status in nodes
            if status and status.stage and status.state == "training"
        }
        self._heal(nodes, serving)
        for step in fresh_steps:
            if self._random.random() < self._share and not is_over:
                self._strike(step + 1, serving)

    @property
    def num_killed(self) -> int:
        """How many holders were killed."""
        return sum(len(loss.names) for loss in self.losses)

    def _strike(self, step: int, serving: dict[str, int]) -> None:
        """Kill a holder, or all of its stage; not the last one of what cannot be rebuilt."""
        by_stage = {k: sorted(n for n, s in serving.items() if s == k) for k in serving.values()}
        victims = [name for name in sorted(serving) if self._may_kill(by_stage, serving[name])]
        if not victims:
            return
        stage = serving[self._random.choice(victims)]
        holders = by_stage[stage]
        takes_all = self._is_rebuildable(by_stage, stage) and (
            self._random.random() < _ALL_OF_A_STAGE
        )
        names = holders if takes_all else [self._random.choice(holders)]
        for name in names:
            self._swarm.kill(name)
            self._swarm.spawn("volunteer")
        left = frozenset(holders) - set(names)
        self.losses.append(Loss(step, stage, tuple(names), left, was_last=not left))

    def _may_kill(self, by_stage: dict[int, list[str]], stage: int) -> bool:
        return len(by_stage[stage]) > 1 or self._is_rebuildable(by_stage, stage)

    def _is_rebuildable(self, by_stage: dict[int, list[str]], stage: int) -> bool:
        manifest = self._swarm.manifest
        is_interior = 1 < stage < manifest.num_stages
        has_neighbours = by_stage.get(stage - 1) and by_stage.get(stage + 1)
        return bool(manifest.recovery.method != "none" and is_interior and has_neighbours)

    def _heal(
        self, nodes: Sequence[tuple[str, NodeStatus | None]], serving: dict[str, int]
    ) -> None:
        known = dict(nodes)
        for loss in self.losses:
            if loss.healed:
                continue
            came = [n for n, k in serving.items() if k == loss.stage and n not in loss.others]
            status = known.get(came[0]) if came else None
            if status is not None:
                seconds = time.monotonic() - loss.at
                loss.healed = f"{came[0]} after {seconds:.0f} s, state from {status.state_origin}"
