"""Holders that are fully booked by flows keep a place for what replaces something lost."""

from __future__ import annotations

import pytest
import trio
from simulated_swarms import toy_swarm

from protocol.core.handing_on import HandingOn
from protocol.core.holder_flow import HolderFlow
from protocol.keys import PeerId
from protocol.messages import WorkId
from protocol.ports import JobKind
from protocol.routing import FlowRouter
from protocol.simulation.checks import check_law
from protocol.simulation.faults import Fault
from protocol.simulation.host import FREE
from protocol.simulation.world import NodePlan

COSTS: dict[JobKind, float] = {**FREE, "forward": 0.2, "backward": 0.4, "edge": 0.05, "embed": 0.02}
STAGES = (0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
MIDDLE, STEP, CAPACITY, QUOTA = 5, 1, 2, 16
# One offer and its way; a second pause of an offer that found no place is longer.
AT_ONCE_S = 0.1


def test_a_replacement_never_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder has one place for new microbatches, of which there are too many, and a spare."""
    repaired: dict[WorkId, float] = {}
    begun: dict[WorkId, float] = {}
    refused: list[WorkId] = []
    booked: dict[PeerId, int] = {}
    repair, begin, has_room = HandingOn._repairing, HolderFlow._begin, HolderFlow._has_room_for

    def note_repair(self, passage, peer, cause):
        if self._ctx.stage == 1 and passage.id.step == STEP:
            repaired.setdefault(passage.id, trio.current_time())
        repair(self, passage, peer, cause)

    async def note_begin(self, message, envelope):
        if message.is_repair and message.stage == 2:
            begun.setdefault(message.work, trio.current_time())
        await begin(self, message, envelope)

    def note_room(self, message):
        room = has_room(self, message)
        if message.is_repair and message.stage == 2:
            booked[self._ctx.me] = self.num_open
            refused.extend([] if room else [message.work])
        return room

    monkeypatch.setattr(FlowRouter, "window", lambda *_: QUOTA)
    monkeypatch.setattr(HandingOn, "_repairing", note_repair)
    monkeypatch.setattr(HolderFlow, "_begin", note_begin)
    monkeypatch.setattr(HolderFlow, "_has_room_for", note_room)
    simulation = toy_swarm(
        num_stages=3, steps=3, quota=QUOTA, min_holders=2, costs=COSTS,
        plans=tuple(NodePlan(stage, capacity=CAPACITY) for stage in STAGES),
        faults=[Fault("kill", MIDDLE, "before_backward", step=STEP)],
    )  # fmt: skip
    result = simulation.run(300.0)
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    assert repaired
    assert max(booked.values()) == CAPACITY - 1, "nobody was booked"
    assert refused == []
    for work, at_s in repaired.items():
        assert begun[work] - at_s < AT_ONCE_S
