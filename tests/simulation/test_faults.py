"""Random faults: the swarm keeps exactly-once and the law, or pauses; never two sides."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from simulated_swarms import toy_swarm

from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import POINTS, Action, Fault, random_script
from protocol.simulation.world import NodePlan, Result

NUM_NODES = 8
# Authorities (the first data nodes), and the stage of each node.
SHAPES = ((1, (0, 0, 1, 1, 1, 2, 2, 2)), (3, (0, 0, 0, 1, 1, 1, 2, 2)))
STEPS = 4
QUICK, MANY = 60, 1000
HOLDER_POINTS = {"after_forward", "after_input_gradient"}


def play(
    script: tuple[Fault, ...], seed: int = 0, quota: int = 6, limit_s: float = 300.0
) -> Result:
    """Run a swarm under a script and check all that must hold whatever happens."""
    authorities, stages = SHAPES[seed % len(SHAPES)]
    simulation = toy_swarm(
        steps=STEPS,
        quota=quota,
        min_holders=2,
        seed=seed,
        faults=script,
        authorities=authorities,
        plans=tuple(NodePlan(stage) for stage in stages),
    )
    result = simulation.run(limit_s)
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    assert [node.failure for node in result.nodes if node.failure] == []
    return result


def random_run(seed: int) -> Result:
    return play(random_script(Random(seed), NUM_NODES, STEPS), seed)


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_faults(seed: int) -> None:
    random_run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, QUICK + MANY))
def test_many_random_faults(seed: int) -> None:
    random_run(seed)


DATA_POINTS = [p for p in POINTS if p not in {*HOLDER_POINTS, "in_state_transfer"}]
BLOCK_POINTS = [p for p in POINTS if p not in {"before_close", "in_state_transfer"}]
PLACES = [(1, point) for point in DATA_POINTS] + [
    (node, point) for node in (3, 6) for point in BLOCK_POINTS
]


@pytest.mark.parametrize(("node", "point"), PLACES)
@pytest.mark.parametrize("action", ["kill", "freeze"])
def test_one_node_lost_at_a_point_never_stops_the_swarm(
    action: Action, node: int, point: str
) -> None:
    fault = Fault(action, node, point, step=1, duration_s=20.0, replace_after_s=2.0)
    result = play((fault,), quota=18)
    assert result.struck == [fault]
    assert result.is_finished


@pytest.mark.parametrize("action", ["kill", "freeze"])
def test_a_returner_lost_again_in_its_state_transfer(action: Action) -> None:
    first = Fault("kill", 3, "after_commit", step=1, replace_after_s=0.2)
    again = [
        Fault(action, 3, "in_state_transfer", step=step, duration_s=9.0, replace_after_s=1.0)
        for step in range(STEPS)
    ]
    result = play((first, *again), quota=18)
    assert len(result.struck) > 1
    assert result.is_finished


def test_random_scripts_reach_their_points() -> None:
    """Scripts that never strike would prove nothing."""
    struck = Counter(f.action for seed in range(12) for f in random_run(seed).struck)
    assert len(struck) >= 4
