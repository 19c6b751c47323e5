"""A holder dies before its backward pass: the path is mended, and newcomers find their places."""

from __future__ import annotations

from collections import Counter

import pytest
from harness import Finished, LawSwarm, Plan, assert_law, reference_of, run_swarm
from lifecycle_kit import counters

from node.local_swarm import Daemon

STEP, STEPS, QUOTA = 3, 20, 24  # long enough for the newcomers to find their places
VICTIM = "stage-2-a"
ROOM = 14  # of two holders, one place each kept for repairs


class MendedSwarm(LawSwarm):
    """When the holder of stage 2 dies, one volunteer names no stage, and one insists on stage 3."""

    def replace(self, daemon: Daemon) -> None:
        """Start both."""
        self.successors += [self.spawn("volunteer"), self.spawn("volunteer", 3)]


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Counter[str]]:
    """What the swarm left, and the counters of all nodes but the victim."""
    totals: Counter[str] = Counter()
    plan = Plan(steps=STEPS, quota=QUOTA, data_nodes=1, faults={VICTIM: f"before_backward@{STEP}"})

    def count(swarm: LawSwarm) -> None:
        for daemon in swarm.survivors():
            totals.update(counters(daemon))

    root = tmp_path_factory.mktemp("repair")
    return run_swarm(root, plan, count, kind=MendedSwarm), totals


def test_the_path_is_mended_and_nothing_is_reissued(
    mended: tuple[Finished, Counter[str]],
) -> None:
    """The replacement computes its own stage; the first tries count, and the law holds."""
    finished, totals = mended
    assert finished.killed == [VICTIM]
    assert totals["path_repairs"] >= 1
    assert totals["microbatches_reissued"] == 0
    for logged in finished.log:
        assert [slot for _, slot in logged.entries] == list(range(QUOTA))
    assert_law(finished, reference_of(finished))


def test_a_volunteer_finds_a_stage_by_itself_unless_its_owner_names_one(
    mended: tuple[Finished, Counter[str]],
) -> None:
    """Which one, tests/swarm/test_law_churn.py holds: here the dead holder's claim still counts."""
    finished, _ = mended
    assert all(finished.joined(name) for name in finished.successors)
    found, named = (finished.status[name] for name in finished.successors)
    assert found.stage_reason in {
        "it had a single holder",
        f"it was the narrowest, with room for {ROOM} microbatches",
    }
    assert (named.stage, named.stage_reason) == (3, "its owner asked for it")
