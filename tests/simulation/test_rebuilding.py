"""A stage whose last holder dies is rebuilt from its neighbours, and the swarm trains on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulated_swarms import toy_swarm

from protocol.simulation.checks import check_exactly_once, check_one_history, check_shares
from protocol.simulation.faults import Fault
from protocol.simulation.world import NodePlan, Result

# Two data nodes, five stages of one holder, and one node that goes where it is needed.
STAGES = (0, 0, 1, 2, 3, 4, 5)
LOST, SPARE = 4, 7  # the holder of stage 3; the spare joins stage 1 at first
STEPS = 6
POINTS = ("before_step", "after_forward", "after_commit", "in_reconcile", "after_prepared")


def play(*faults: Fault, joins_at_s: Sequence[float] = (0.0,), **more: object) -> Result:
    plans = [NodePlan(stage) for stage in STAGES]
    plans += [NodePlan(None, joins_at_s=at_s) for at_s in joins_at_s]
    options = {"plans": plans, "recovery": "checkfree", **more}
    simulation = toy_swarm(num_stages=5, steps=STEPS, faults=faults, **options)
    result = simulation.run(60.0)
    check_one_history(result.moves)
    check_shares(check_exactly_once(result.moves), result.decisions)
    assert [node.failure for node in result.nodes if node.failure] == []
    return result


def healed_by(result: Result) -> list[str]:
    return [entry.who for entry in result.trace.find("stage_rebuilt")]


@pytest.mark.parametrize("point", POINTS)
def test_a_lost_stage_is_rebuilt_by_a_spare_holder_of_another(point: str) -> None:
    result = play(Fault("kill", LOST, point, step=2))
    assert result.is_finished
    assert healed_by(result) == [f"n{SPARE}"]


def test_a_lost_stage_is_rebuilt_by_a_newcomer() -> None:
    result = play(Fault("kill", LOST, "after_commit", step=2), joins_at_s=[12.0])
    assert result.is_finished
    assert healed_by(result) == [f"n{SPARE}"]


def test_two_stages_that_are_no_neighbours_are_rebuilt_at_once() -> None:
    lost = [Fault("kill", node, "after_commit", step=2) for node in (3, 5)]  # stages 2 and 4
    result = play(*lost, joins_at_s=[0.0, 0.0])
    assert result.is_finished
    assert sorted(healed_by(result)) == ["n7", "n8"]


@pytest.mark.parametrize("nodes", [(4, 5), (2,), (6,)], ids=["neighbours", "the first", "the last"])
def test_what_cannot_be_rebuilt_pauses_the_swarm(nodes: tuple[int, ...]) -> None:
    lost = [Fault("kill", node, "before_step", step=2) for node in nodes]
    result = play(*lost, joins_at_s=[10.0, 10.0])
    assert not result.is_finished
    assert healed_by(result) == []
    assert list(result.trace.find("swarm_paused"))
    assert max(move.step for move in result.moves) == 2


@pytest.mark.parametrize("node", [2, 6], ids=["the first", "the last"])
def test_with_twins_the_ends_are_rebuilt_too(node: int) -> None:
    lost = Fault("kill", node, "after_commit", step=2)
    result = play(lost, joins_at_s=[9.0], recovery="checkfree_plus")
    assert result.is_finished
    (event,) = result.trace.find("stage_rebuilt")
    told = dict(event.details)
    assert (told["stage"], told["below"], told["above"]) == ((1, 2, 2) if node == 2 else (5, 4, 4))


def test_without_recovery_in_the_manifest_nothing_is_rebuilt() -> None:
    result = play(Fault("kill", LOST, "after_commit", step=2), recovery="none")
    assert not result.is_finished
    assert healed_by(result) == []


def test_the_rebuilder_dies_too() -> None:
    lost = Fault("kill", LOST, "after_commit", step=2)
    result = play(lost, Fault("kill", SPARE, "in_rebuild", step=2), joins_at_s=[0.0, 12.0])
    assert result.is_finished
    assert healed_by(result) == ["n8"]


def test_a_stage_is_rebuilt_again_and_again() -> None:
    first = Fault("kill", LOST, "after_commit", step=1)
    again = [Fault("kill", SPARE, "after_commit", step=1), Fault("kill", 8, "before_step", step=3)]
    result = play(first, *again, joins_at_s=[0.0, 12.0, 24.0])
    assert result.is_finished
    assert healed_by(result) == ["n7", "n8", "n9"]


def test_nobody_goes_where_its_memory_has_no_room() -> None:
    plans = [NodePlan(stage) for stage in STAGES]
    plans += [NodePlan(None, fits=dict.fromkeys((1, 2, 4, 5), 4)), NodePlan(None, joins_at_s=12.0)]
    result = play(Fault("kill", LOST, "after_commit", step=2), plans=plans)
    assert result.is_finished
    assert healed_by(result) == ["n8"]


def test_who_comes_back_in_time_has_the_state_itself() -> None:
    fault = Fault("kill", LOST, "after_commit", step=2, replace_after_s=3.0)
    result = play(fault, snapshot_steps=1)
    assert result.is_finished
    assert healed_by(result) == []
