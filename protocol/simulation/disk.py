"""A simulated computer's disk: it outlives the node, but not a write that the power cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio

from protocol.core.snapshots import MemorySnapshots
from protocol.ports import StateView, Tensor
from protocol.simulation.host import VirtualHost


@dataclass
class SimulatedSnapshots:
    """Implements Snapshots for one life of a node; a write takes ``write_s`` of virtual time."""

    disk: MemorySnapshots
    host: VirtualHost
    write_s: float = 0.0

    def holds(self, digest: str) -> bool:
        """Whether a snapshot has this digest."""
        return self.disk.holds(digest)

    def is_decided(self, digest: str) -> bool:
        """Whether it is there and known to be decided."""
        return self.disk.is_decided(digest)

    def decided(self, stage: int) -> Sequence[tuple[int, str]]:
        """Step and digest of the decided states of a stage; what was written last comes first."""
        return self.disk.decided(stage)

    async def load(self, digest: str) -> Tensor | None:
        """Return the bytes, or None."""
        return await self.disk.load(digest)

    async def save(self, stage: int, view: StateView, *, is_decided: bool) -> None:
        """Keep a copy, unless the computer dies before it is written."""
        await trio.sleep(self.write_s)
        await self.host.awake()
        if self.host.is_alive:
            await self.disk.save(stage, view, is_decided=is_decided)

    async def decide(self, digest: str) -> None:
        """Note that it is decided."""
        if self.host.is_alive:
            await self.disk.decide(digest)

    async def set_aside(self, digest: str) -> None:
        """Forget it."""
        await self.disk.set_aside(digest)
