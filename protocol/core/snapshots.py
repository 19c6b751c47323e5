"""Snapshots that live as long as the object: for simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.ports import StateView, Tensor


def to_keep(decided: Sequence[tuple[int, str]], num_kept: int, every: int) -> set[str]:
    """The digests that stay, of states in the order in which they were written, the last first.

    They are the last one, and the last ``num_kept`` of the steps that all stages write: a node that
    is alone in its stage writes others between them, which no other stage has.
    """
    shared = [digest for step, digest in decided if every and step % every == 0]
    return {*shared[:num_kept], *(digest for _, digest in decided[:1])}


@dataclass
class KeptState:
    """One state of a stage, and whether the swarm is known to have decided on it."""

    stage: int
    step: int
    data: Tensor
    is_decided: bool


@dataclass
class MemorySnapshots:
    """Implements Snapshots; keeps what ``to_keep`` names, and prepared states after that."""

    num_kept: int = 2
    every: int = 1
    kept: dict[str, KeptState] = field(default_factory=dict)

    def holds(self, digest: str) -> bool:
        """Whether a snapshot has this digest."""
        return digest in self.kept

    def is_decided(self, digest: str) -> bool:
        """Whether it is there and known to be decided."""
        return digest in self.kept and self.kept[digest].is_decided

    def decided(self, stage: int) -> list[tuple[int, str]]:
        """Step and digest of the decided states of a stage; what was written last comes first."""
        found = [(k.step, d) for d, k in self.kept.items() if k.stage == stage and k.is_decided]
        return found[::-1]

    async def load(self, digest: str) -> Tensor | None:
        """Return the bytes, or None."""
        known = self.kept.get(digest)
        return known.data if known else None

    async def save(self, stage: int, view: StateView, *, is_decided: bool) -> None:
        """Keep a copy."""
        step, digest, pieces = view
        self.kept.pop(digest, None)
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
        for stage in {k.stage for k in self.kept.values()}:
            decided = self.decided(stage)
            keep = to_keep(decided, self.num_kept, self.every)
            last = decided[0][0] if decided else -1
            self.kept = {
                digest: k
                for digest, k in self.kept.items()
                if k.stage != stage or (digest in keep if k.is_decided else k.step > last)
            }
