"""A swarm that was stopped as a whole goes on from what its disks kept, and never on two sides."""

from __future__ import annotations

from random import Random

import pytest
from simulated_swarms import toy_swarm

from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import Fault, SwarmAction
from protocol.simulation.host import FREE
from protocol.simulation.world import NodePlan, Result

STEPS = 6
# Authorities (the first data nodes), and the stage of each node: replicated, alone, and between.
SHAPES = ((1, (0, 0, 1, 1, 2, 2)), (1, (0, 1, 2)), (3, (0, 0, 0, 1, 1, 2)))
COSTS = {**FREE, "forward": 0.05, "backward": 0.1, "update": 0.02}
QUICK, MANY = 9, 600
RUN_S = 8.0  # about as long as the undisturbed run takes, once it has begun
LEADERSHIP_S = 10.0  # until one of several authorities leads


def play(
    seed: int, *actions: SwarmAction, snapshot_steps: int, patience_s: float | None = None
) -> Result:
    """Run a swarm that is restarted as a whole at random moments; check what must always hold."""
    rng = Random(seed)
    authorities, stages = SHAPES[seed % len(SHAPES)]
    faults, at_s = [], 0.0
    for action in actions:
        at_s += rng.uniform(0.3, RUN_S) + (LEADERSHIP_S if authorities > 1 else 0)
        down_s = rng.uniform(0.5, 20)
        duration_s = rng.uniform(0, 2) if patience_s is None else patience_s
        faults.append(
            Fault(action, 0, at_s=at_s, duration_s=duration_s, replace_after_s=duration_s + down_s)
        )
        at_s += duration_s + down_s
    simulation = toy_swarm(
        steps=STEPS,
        quota=6,
        min_holders=1,
        seed=seed,
        faults=faults,
        authorities=authorities,
        plans=tuple(NodePlan(stage) for stage in stages),
        costs=COSTS,
        snapshot_steps=snapshot_steps,
        snapshot_write_s=rng.choice((0.0, 0.05, 0.4)),
    )
    result = simulation.run(limit_s=400)
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    assert [node.failure for node in result.nodes if node.failure] == []
    return result


def cut(seed: int) -> None:
    result = play(seed, "cut_all", "cut_all", snapshot_steps=1)
    assert result.is_finished


def stop(seed: int) -> None:
    result = play(seed, "stop_all", "stop_all", snapshot_steps=100)
    assert result.is_finished


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_power_cut_of_all_costs_no_state_that_was_promised(seed: int) -> None:
    cut(seed)


@pytest.mark.parametrize("seed", range(QUICK))
def test_a_swarm_that_was_stopped_goes_on_however_rare_its_snapshots(seed: int) -> None:
    stop(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, QUICK + MANY))
def test_many_restarts(seed: int) -> None:
    (cut if seed % 2 else stop)(seed)


@pytest.mark.parametrize("node", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_whoever_is_alone_in_its_stage_comes_back_into_the_step(seed: int, node: int) -> None:
    """The others stay up, and keep what it had committed before."""
    at_s = Random(f"{seed} {node}").uniform(1.5, 6)
    simulation = toy_swarm(
        steps=STEPS,
        quota=6,
        min_holders=1,
        seed=seed,
        faults=[Fault("kill", node, at_s=at_s, replace_after_s=0.5 + seed)],
        plans=tuple(map(NodePlan, SHAPES[1][1])),
        costs=COSTS,
        snapshot_steps=100,
    )
    result = simulation.run(limit_s=100)
    assert result.struck
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)


@pytest.mark.parametrize("seed", range(0, QUICK, 3))
def test_states_that_nobody_kept_pause_the_swarm(seed: int) -> None:
    """Two holders each, snapshots every fourth step, and the power of all is cut."""
    play(seed, "cut_all", snapshot_steps=4)


def test_without_snapshots_a_swarm_that_was_cut_off_pauses() -> None:
    result = play(0, "cut_all", snapshot_steps=0)
    assert not result.is_finished
