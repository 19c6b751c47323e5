"""Snapshots that live as long as the object: for simulation and tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from protocol.ports import StateView, Tensor


@dataclass
class KeptState:
    """One state of a stage, and whether the swarm is known to have decided on it."""

    stage: int
    step: int
    data: Tensor
    is_decided: bool


@dataclass
class MemorySnapshots:
    """Implements Snapshots; keeps the last ``num_kept`` decided states and those after them."""

    num_kept: int = 2
    kept: dict[str, KeptState] = field(default_factory=dict)

    def holds(self, digest: str) -> bool:
        """Whether a snapshot has this digest."""
        return digest in self.kept

    def is_decided(self, digest: str) -> bool:
        """Whether it is there and known to be decided."""
        return digest in self.kept and self.kept[digest].is_decided

    def newest(self, stage: int) -> str | None:
        """The digest of the latest decided state of a stage."""
        decided = {d: k.step for d, k in self.kept.items() if k.stage == stage and k.is_decided}
        return max(decided, key=lambda d: decided[d], default=None)

    async def load(self, digest: str) -> Tensor | None:
        """Return the bytes, or None."""
        known = self.kept.get(digest)
        return known.data if known else None

    async def save(self, stage: int, view: StateView, *, is_decided: bool) -> None:
        """Keep a copy."""
        step, digest, pieces = view
        self.kept[digest] = KeptState(stage, step, torch.cat(pieces), is_decided)
        self._prune()

    async def decide(self, digest: str) -> None:
        """Note that it is decided."""
        if digest in self.kept:
            self.kept[digest].is_decided = True
            self._prune()

    async def set_aside(self, digest: str) -> None:
        """Forget it."""
        self.kept.pop(digest, None)

    def _prune(self) -> None:
        steps = sorted((k.step for k in self.kept.values() if k.is_decided), reverse=True)
        if not steps:
            return
        oldest = steps[: self.num_kept][-1]
        self.kept = {
            digest: k
            for digest, k in self.kept.items()
            if (k.step >= oldest if k.is_decided else k.step > steps[0])
        }
