"""A swarm that lost its newest states goes back to the step that all disks have, and on from it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulated_swarms import toy_swarm

from protocol.deadlines import Deadlines
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import Fault
from protocol.simulation.host import FREE
from protocol.simulation.world import NodePlan, Result

STEPS = 8
EVERY = 2  # steps between snapshots
REPLICATED = (0, 1, 1, 2, 2)
COSTS = {**FREE, "forward": 0.05, "backward": 0.1, "update": 0.02}
WAIT_S = 150.0


def play(
    *faults: Fault, stages: Sequence[int] = REPLICATED, seed: int = 0, limit_s: float = 120
) -> Result:
    simulation = toy_swarm(
        steps=STEPS,
        quota=6,
        seed=seed,
        faults=faults,
        plans=tuple(map(NodePlan, stages)),
        costs=COSTS,
        snapshot_steps=EVERY,
        snapshot_write_s=0.05,
        deadlines=Deadlines(state_wait_s=WAIT_S),
    )
    result = simulation.run(limit_s=limit_s)
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    return result


def went_back(result: Result) -> set[tuple[int, int]]:
    """(to, from) of every time that some node heard of it."""
    events = [dict(event.details) for event in result.trace.find("went_back")]
    return {(event["step"], event["last_step"]) for event in events}


@pytest.mark.parametrize("seed", range(3))
def test_after_a_power_cut_it_computes_the_lost_steps_again(seed: int) -> None:
    """Replicas write now and then; the states of the last steps were in memory alone."""
    cut = Fault("cut_all", 0, point="after_commit", step=5, replace_after_s=1.0)
    result = play(cut, seed=seed)
    assert result.is_finished
    assert went_back(result) == {(4, 5)}
    assert not list(result.trace.find("failed"))


def test_one_stage_that_comes_back_without_its_state_takes_the_others_back() -> None:
    """They hold the state of step 5 in memory, and the older one on their disks."""
    holders = [index for index, stage in enumerate(REPLICATED) if stage == 1]
    kills = [
        Fault("kill", index, point="after_commit", step=5, replace_after_s=1.0 + index)
        for index in holders
    ]
    result = play(*kills)
    assert len(result.struck) == len(kills)
    assert result.is_finished
    assert went_back(result) == {(4, 5)}


def test_it_waits_for_a_member_that_may_have_the_state() -> None:
    kills = [
        Fault("kill", 1, point="after_commit", step=5, replace_after_s=1.0),
        Fault("kill", 2, point="after_commit", step=5),
    ]
    early = play(*kills, limit_s=WAIT_S / 2)
    assert not went_back(early)
    assert not early.is_finished
    late = play(*kills, limit_s=WAIT_S + 60)
    assert went_back(late) == {(4, 5)}
    assert late.is_finished


def test_twice_in_a_row() -> None:
    cuts = [
        Fault("cut_all", 0, point="after_commit", step=5, occurrence=n, replace_after_s=1.0)
        for n in (1, 5)
    ]
    result = play(*cuts, limit_s=200)
    assert len(result.struck) == 2
    assert result.is_finished
    assert went_back(result) == {(4, 5)}
