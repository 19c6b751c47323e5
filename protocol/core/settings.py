"""What the owner of a node decides, as far as the core cares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protocol.deadlines import Deadlines
from protocol.joining import MigrationRules
from protocol.keys import PeerId
from protocol.routing import RoutingSettings


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the owner of a node decides: its stage (None: where it is needed most), its room.

    ``fits`` names the stages that its memory has room for, with the microbatches that it can hold
    there; None: all of them, with ``capacity``. Every so many steps it writes a snapshot, with 0
    none. ``cpu_clock`` is the thread's. ``session_bytes`` is the memory for weights and caches that
    it keeps for generation and export. It sends joiners at most ``state_bytes_per_s``.
    """

    stage: int | None = None
    capacity: int = 8
    snapshot_steps: int = 0
    deadlines: Deadlines = field(default_factory=Deadlines)
    addresses: Callable[[], tuple[str, ...]] = tuple
    sidecar_id: PeerId | None = None
    wall_clock: Callable[[], float] = lambda: 0.0
    cpu_clock: Callable[[], float] = lambda: 0.0
    session_bytes: int = 2**28
    state_bytes_per_s: float | None = None
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    fits: Mapping[int, int] | None = None
    migration: MigrationRules = field(default_factory=MigrationRules)

    def capacity_at(self, stage: int) -> int:
        """The microbatches that this node can hold at once if it serves ``stage``."""
        return (self.fits or {}).get(stage, self.capacity)
