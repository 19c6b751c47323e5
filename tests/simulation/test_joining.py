"""Volunteers that find their stages themselves, and holders that move: real cores, virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import trio
from simulated_swarms import toy_swarm

from protocol.joining import MigrationRules
from protocol.records import NodeRecord
from protocol.simulation.checks import check_law
from protocol.simulation.faults import Fault
from protocol.simulation.places import Link, uniform
from protocol.simulation.world import NodePlan, Result, Simulation

VOLUNTEER = NodePlan(None)
# A holder is considered every eight seconds; steps take about one.
RESTLESS = MigrationRules(num_looks=2, cool_down_s=10.0)
FAR = uniform(Link(0.08))


def swarm_of(plans: Sequence[NodePlan], **options) -> Simulation:
    simulation = toy_swarm(plans=plans, **options)
    simulation.migration = RESTLESS
    simulation.network.taps.append(_nobody_assigns)
    return simulation


def _nobody_assigns(_sender, _receiver, message) -> None:
    assert message.kind != "assign"


def holders_of(result: Result) -> Counter[int]:
    """How many holders each stage had at the end, by the last decision."""
    roster = result.nodes[0].core.decision.roster
    return Counter({stage: len(holders) for stage, holders in enumerate(roster) if stage})


def stages_chosen(result: Result, node: str) -> list[object]:
    entries = result.trace.find("stage_chosen")
    return [dict(entry.details)["stage"] for entry in entries if entry.who == node]


def moves_of(result: Result) -> dict[str, list[object]]:
    """Who served more than one stage, and which."""
    chosen = {n.host.name: stages_chosen(result, n.host.name) for n in result.nodes}
    return {name: stages for name, stages in chosen.items() if len(stages) > 1}


# --- the first stage -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_eight_volunteers_at_once_found_a_swarm_and_nobody_assigns(seed: int) -> None:
    simulation = swarm_of((NodePlan(0), *[VOLUNTEER] * 8), num_stages=4, steps=3, seed=seed)
    result = simulation.run()
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves)
    assert {node.core.ctx.stage for node in result.nodes} == {0, 1, 2, 3, 4}
    assert Counter(n.core.ctx.stage for n in result.nodes[1:]) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert result.nodes[0].core.placement.reason == "it feeds the text"


@pytest.mark.parametrize("staleness_s", [0.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_eight_newcomers_at_once_spread_over_a_running_swarm(staleness_s: float) -> None:
    late = [NodePlan(None, joins_at_s=2.0 + 0.05 * n) for n in range(8)]
    plans = (NodePlan(0), *(NodePlan(k) for k in (1, 2, 3, 4)), *late)
    simulation = swarm_of(plans, num_stages=4, steps=14, quota=16, profile=FAR)
    simulation.registry.staleness_s = staleness_s
    result = simulation.run()
    check_law(simulation.manifest.manifest, result.moves)
    assert holders_of(result) == {1: 3, 2: 3, 3: 3, 4: 3}
    assert moves_of(result) == {}


def test_a_volunteer_that_comes_back_goes_where_it_was() -> None:
    plans = (NodePlan(0), NodePlan(1), NodePlan(1), NodePlan(2), VOLUNTEER)
    back = Fault("kill", 4, at_s=12.0, replace_after_s=2.0)
    simulation = swarm_of(plans, steps=24, profile=FAR, faults=[back])
    result = simulation.run()
    check_law(simulation.manifest.manifest, result.moves)
    assert stages_chosen(result, "n4") == [2, 2]


# --- another stage -------------------------------------------------------------------------


def test_a_stage_that_loses_holders_gets_one_from_where_there_are_more() -> None:
    """Of stage 1 the volunteer alone may go: the others' owners named their stage."""
    plans = (NodePlan(0), *[NodePlan(2)] * 3, NodePlan(1), NodePlan(1), VOLUNTEER)
    dying = [Fault("kill", n, at_s=8.0 + n) for n in (1, 2)]
    simulation = swarm_of(plans, steps=30, quota=12, profile=FAR, faults=dying)
    result = simulation.run()
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves)
    assert holders_of(result) == {1: 2, 2: 2}
    assert list(moves_of(result).values()) == [[1, 2]]


@pytest.mark.slow
def test_no_stage_is_left_with_fewer_than_two() -> None:
    """Two holders of stage 2, two volunteers of stage 1; then one of the former dies."""
    volunteers = [NodePlan(None, joins_at_s=3.0 * n) for n in range(2)]
    plans = (NodePlan(0), NodePlan(2), NodePlan(2), *volunteers)
    dies = Fault("kill", 1, at_s=23.0)
    simulation = swarm_of(plans, steps=120, quota=16, profile=FAR, faults=[dies])
    result = simulation.run()
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves)
    assert holders_of(result) == {1: 2, 2: 1}
    assert moves_of(result) == {}


@pytest.mark.slow
def test_a_gap_that_only_the_registry_shows_moves_nobody() -> None:
    """From some moment on the records of stage 2 are hidden from everybody."""
    holders = [NodePlan(2)] * 3
    volunteers = [NodePlan(None, joins_at_s=3.0 * n) for n in range(3)]
    simulation = swarm_of((NodePlan(0), *holders, *volunteers), steps=120, quota=16, profile=FAR)
    shown = simulation.registry.shown

    def without_stage_2() -> list[NodeRecord]:
        is_whole = trio.current_time() < 15
        return [record for record in shown() if is_whole or record.stage != 2]

    simulation.registry.shown = without_stage_2  # type: ignore[method-assign]
    result = simulation.run()
    assert result.is_finished
    assert holders_of(result) == {1: 3, 2: 3}
    assert moves_of(result) == {}
