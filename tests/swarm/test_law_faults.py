"""The law under crashes: holders and data nodes killed with SIGKILL at named points of a step."""

from __future__ import annotations

import pytest
from harness import Plan, assert_law, reference_of, run_swarm

# A successor needs some seconds to start and to fetch the state, while training goes on.
STEPS = 60
FIRST_FAULT, BETWEEN_FAULTS = 3, 4
GROUPS = [
    ("after_input_gradient", "after_commit", "in_reduce"),
    pytest.param(("after_forward", "in_reconcile", "after_prepared"), marks=pytest.mark.slow),
    pytest.param(("before_apply", "after_apply", "before_step"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("points", GROUPS, ids="-".join)
def test_holders_die_and_successors_join(
    points: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In each stage one of two holders dies; another takes its place by state transfer.

    The first successor dies too, with the state in its hands but not yet taken.
    """
    faults = {
        f"stage-{stage}-a": f"{point}@{FIRST_FAULT + BETWEEN_FAULTS * (stage - 1)}"
        for stage, point in enumerate(points, start=1)
    }
    faults["stage-1-c"] = "in_state_transfer@any"
    plan = Plan(steps=STEPS, quota=16, data_nodes=1, faults=faults)
    finished = run_swarm(tmp_path_factory.mktemp("faults"), plan)
    assert sorted(finished.killed) == sorted(faults)
    assert len(finished.successors) == len(faults)
    lasting = [name for name in finished.successors if name not in faults]
    assert len(lasting) == len(points)
    assert all(finished.joined(name) for name in lasting)
    for logged in finished.log:  # exactly once, whoever died
        assert [slot for _, slot in logged.entries] == list(range(16))
    assert_law(finished, reference_of(finished))


@pytest.mark.parametrize(
    "point", ["after_commit", pytest.param("before_close", marks=pytest.mark.slow)]
)
def test_a_data_node_dies(point: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The one that is no authority dies; the reference replays what the log says counted."""
    plan = Plan(faults={"data-2": f"{point}@6"})
    finished = run_swarm(tmp_path_factory.mktemp("data"), plan)
    assert finished.killed == ["data-2"]
    drawn = {logged.step: {node for node, _ in logged.entries} for logged in finished.log}
    assert finished.peers["data-2"] in drawn[5]
    assert finished.peers["data-2"] not in drawn[7]
    assert_law(finished, reference_of(finished))
