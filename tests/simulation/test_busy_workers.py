"""Random faults where computing takes time, so that messages meet jobs that wait for the worker.

With free jobs nothing ever waits, and the races between a queue and the messages that void its
work do not show: these seeds broke nodes that passed every run without costs.
"""

from __future__ import annotations

from random import Random

import pytest
from simulated_swarms import toy_swarm

from protocol.ports import JobKind
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import random_script
from protocol.simulation.world import NodePlan, Result

COSTS: dict[JobKind, float] = {
    "embed": 0.02, "forward": 0.05, "backward": 0.1, "edge": 0.05,
    "commit": 0.01, "update": 0.1, "state": 0.1,
}  # fmt: skip
STAGES = (0, 0, 0, 1, 1, 1, 2, 2)
SEEDS = (103, 105, 110, 111, 124, 127, 115, 121)


def play(seed: int) -> Result:
    """Run a swarm of busy nodes under a random script and check all that must hold."""
    simulation = toy_swarm(
        steps=4,
        quota=12,
        min_holders=2,
        seed=seed,
        faults=random_script(Random(seed), len(STAGES), 4),
        authorities=3,
        plans=tuple(NodePlan(stage) for stage in STAGES),
        costs=COSTS,
    )
    result = simulation.run(600.0)
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    assert [node.failure for node in result.nodes if node.failure] == []
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults_among_busy_nodes(seed: int) -> None:
    assert play(seed).is_finished


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_random_faults_among_busy_nodes(seed: int) -> None:
    play(seed)
