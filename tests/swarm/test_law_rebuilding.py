"""The law for a stage that was rebuilt: one computer that does the same comes to the same."""

from __future__ import annotations

import json

import pytest
from harness import Finished, Plan, assert_law, reference_of, run_swarm
from reference.law import LawBroken

STEPS, LOST, STEP = 12, 2, 5
PLAN = Plan(
    steps=STEPS,
    holders=1,
    data_nodes=1,
    recovery="checkfree",
    faults={f"stage-{LOST}-a": f"after_commit@{STEP}"},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run_swarm(tmp_path_factory.mktemp("rebuilt"), PLAN)


def events(finished: Finished, name: str) -> list[dict]:
    (successor,) = finished.successors
    lines = (finished.root / successor / "log.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry.get("event") == name]


def test_the_successor_rebuilt_the_stage_from_its_neighbours(finished: Finished) -> None:
    (event,) = events(finished, "stage_rebuilt")
    assert (event["stage"], event["step"], event["below"], event["above"]) == (LOST, STEP, 1, 3)
    assert 0 < event["weight_above"] < 1
    (successor,) = finished.successors
    told = finished.status[successor]
    assert told.state_origin == f"the mean of stages 1 and 3, at step {STEP}"


def test_the_swarm_computes_what_one_computer_computes_with_the_same_rebuilding(
    finished: Finished,
) -> None:
    assert_law(finished, reference_of(finished, {STEP: LOST}))


def test_a_computer_that_loses_nothing_comes_to_something_else(finished: Finished) -> None:
    with pytest.raises(LawBroken):
        assert_law(finished, reference_of(finished))


def test_no_microbatch_counts_twice(finished: Finished) -> None:
    slots = [sorted(slot for _, slot in logged.entries) for logged in finished.log]
    assert slots == [list(range(PLAN.quota))] * STEPS
