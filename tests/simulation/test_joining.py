"""Volunteers that find their stages themselves, and holders that move: real cores, virtual time."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_swarms import toy_swarm

from protocol.core.settings import NodeSettings
from protocol.simulation.checks import check_law
from protocol.simulation.faults import Fault
from protocol.simulation.world import NodePlan, Simulation

VOLUNTEER = NodePlan(None)


def stages_of(result) -> Counter[int]:
    """How many living volunteers without a stage of their owner's serve each stage."""
    cores = [n.core for n in result.nodes if n.plan.stage is None and n.host.frozen_since is None]
    return Counter(core.ctx.stage for core in cores if core.ctx)


def chosen(result) -> list[tuple[str, int]]:
    return [
        (node, int(fields.split("stage=")[1].split()[0]))
        for node, fields in ((e.node, str(e.fields)) for e in result.trace.events)
        if "stage_chosen" in fields
    ]


def test_eight_volunteers_at_once_found_a_swarm_without_anybody_assigning() -> None:
    plans = (NodePlan(0), *[VOLUNTEER] * 8)
    simulation = toy_swarm(num_stages=4, steps=3, plans=plans)
    simulation.network.taps.append(nobody_assigns)
    result = simulation.run()
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves)
    assert stages_of(result) == {1: 2, 2: 2, 3: 2, 4: 2}


def nobody_assigns(_sender, _receiver, message) -> None:
    assert message.kind != "assign"
