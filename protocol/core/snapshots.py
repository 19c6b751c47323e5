"""Snapshots that live as long as the object: for simulation and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from protocol.ports import StateView, Tensor


def to_keep(written: Sequence[tuple[int, str, bool]], *, num_kept: int, every: int) -> set[str]:
    """The digests that stay, of states (step, digest, is it decided) in the order of their writing.

    They are the last decided one, and the last ``num_kept`` of the steps that all stages write: a
    node that is alone in its stage writes others between them, which no other stage has. Of the
    prepared ones those stay that may be decided on yet: they are of a later step than the last
    decided one, or written after it, as the swarm may have gone back.
    """
    decided = [(step, digest) for step, digest, is_decided in written if is_decided]
    shared = [digest for step, digest in decided if every and step % every == 0]
    keep = set(shared[max(0, len(shared) - num_kept) :])
    if not decided:
        return {digest for _, digest, _ in written}
    last_step, last = decided[-1]
    is_after = False
    for step, digest, is_decided in written:
        if digest == last or (not is_decided and (step > last_step or is_after)):
            keep.add(digest)
        is_after = is_after or digest == last
    return keep


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
        keep: set[str] = set()
        for stage in {k.stage for k in self.kept.values()}:
            written = [(k.step, d, k.is_decided) for d, k in self.kept.items() if k.stage == stage]
            keep |= to_keep(written, num_kept=self.num_kept, every=self.every)
        self.kept = {digest: k for digest, k in self.kept.items() if digest in keep}
