"""A microbatch on its way: forward over the stages, the loss, backward over the same holders."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from protocol.simulation.training.links import Transfer
from protocol.simulation.training.machine import Span


class Phase(Enum):
    """Where a microbatch is in its life."""

    WAITING = 0  # at its data node, not begun
    FORWARD = 1
    BACKWARD = 2
    COMMITTED = 3


@dataclass(slots=True, eq=False)
class Repair:
    """Another holder computes one stage of a microbatch again.

    ``continues``: its gradient is the one that goes on; otherwise only its sum was lost.
    """

    node: int
    continues: bool
    transfers: list[Transfer] = field(default_factory=list)
    forward: Span | None = None
    has_gradient: bool = False
    is_void: bool = False


@dataclass(slots=True, eq=False)
class Microbatch:
    """``path[k]`` is its holder at stage k, the data node at both ends (0 and S+1).

    ``stage``: where it is, or is sent to. Whatever is under way carries the ``ticket`` of its
    departure and is ignored if the microbatch went another way since. ``forwards`` and
    ``backwards`` hold, by stage, the work that counts. ``is_kept``: nobody at ``stage`` has room,
    and the hop before tries again; ``refused`` has those that it has asked.
    """

    number: int
    data_node: int
    path: list[int | None]
    phase: Phase = Phase.WAITING
    stage: int = 0
    ticket: int = 0
    attempt: int = 0
    sent_s: float = 0.0
    transfer: Transfer | None = None
    forwards: dict[int, Span] = field(default_factory=dict)
    backwards: dict[int, Span] = field(default_factory=dict)
    repairs: dict[int, Repair] = field(default_factory=dict)
    plan: tuple[int, ...] = ()
    refused: set[int] = field(default_factory=set)
    pause_s: float = 0.0
    is_kept: bool = False

    @property
    def slot(self) -> tuple[int, int]:
        """The name under which holders keep memory for it."""
        return self.number, self.attempt

    @property
    def is_done(self) -> bool:
        """Whether it is committed and every stage has its gradient."""
        return self.phase is Phase.COMMITTED and not self.repairs

    def holder(self, stage: int) -> int:
        """Return who has it at a stage that it has been sent to."""
        node = self.path[stage]
        assert node is not None
        return node

    def is_cut_by(self, node: int) -> bool:
        """Whether it was at ``node`` or on its way from there, and never arrived."""
        if self.is_kept:
            return self.phase is Phase.FORWARD and self.path[self.stage - 1] == node
        transfer = self.transfer
        return transfer is not None and transfer.is_cut and transfer.source == node

    def forget(self) -> None:
        """Go back to the beginning: nothing of what was done counts."""
        self.ticket += 1
        self.attempt += 1
        self.phase, self.stage, self.transfer, self.plan = Phase.WAITING, 0, None, ()
        self.is_kept = False
        self.path[1:-1] = [None] * (len(self.path) - 2)
        self.forwards.clear()
        self.backwards.clear()
        for repair in self.repairs.values():
            repair.is_void = True
        self.repairs.clear()
