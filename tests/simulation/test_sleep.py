"""A machine that sleeps with all its nodes, and clocks that jump: no storm, and the law holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import trio
from simulated_swarms import toy_swarm

from protocol.deadlines import Deadlines
from protocol.records import NodeRecord
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import Fault
from protocol.simulation.host import FREE
from protocol.simulation.world import Simulation

NUM_NODES, STEPS = 8, 6
DISTURBED_AT_S, HOUR_S = 6.0, 3600.0
LIMITS = Deadlines()


def swarm(**options: object) -> Simulation:
    """Steps of a second or two, so that the disturbance comes in the middle of one."""
    costs = {**FREE, "forward": 0.3, "backward": 0.3}
    return toy_swarm(steps=STEPS, quota=6, min_holders=3, costs=costs, **options)


@dataclass(frozen=True)
class Account:
    """What a run took: decisions (new terms among them), time, and uses of the registry."""

    num_opened: int
    virtual_s: float
    calls: Counter[str]


def account(simulation: Simulation, limit_s: float = 1000) -> Account:
    """Play to the end and check all that must hold."""
    calls = counted(simulation)
    result = simulation.run(limit_s)
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    return Account(len({d.order for d in result.decisions}), result.virtual_s, calls)


def counted(simulation: Simulation) -> Counter[str]:
    """Count how often nodes write to the registry and look into it."""
    calls, store, shown = Counter(), simulation.registry.store, simulation.registry.shown

    def counting_store(record: NodeRecord) -> None:
        calls["stored"] += 1
        store(record)

    def counting_shown() -> list[NodeRecord]:
        calls["looked"] += 1
        return shown()

    vars(simulation.registry).update(store=counting_store, shown=counting_shown)
    return calls


@pytest.fixture(scope="module")
def quiet() -> Account:
    """The same swarm, undisturbed."""
    return account(swarm())


@pytest.mark.parametrize("asleep_s", [20.0, 1000.0])
def test_all_nodes_sleep_and_wake(asleep_s: float, quiet: Account) -> None:
    """They go on in the step in which they fell asleep, with a few new terms at most."""
    sleep = [
        Fault("freeze", node, at_s=DISTURBED_AT_S, duration_s=asleep_s) for node in range(NUM_NODES)
    ]
    woken = account(swarm(faults=sleep), asleep_s + 300)
    assert woken.virtual_s < asleep_s + quiet.virtual_s + 2 * LIMITS.averaging_s
    assert woken.num_opened <= quiet.num_opened + NUM_NODES
    awake_s = woken.virtual_s - asleep_s
    for kind, number in woken.calls.items():
        assert number <= quiet.calls[kind] * max(1.0, awake_s / quiet.virtual_s) + 10 * NUM_NODES


@pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])
def test_wall_clocks_jump(jump_s: float, quiet: Account) -> None:
    """Nothing of a step depends on wall time: as many decisions, as much time, as many look-ups."""
    simulation = swarm()
    right = simulation.wall_clock

    def jumping() -> float:
        return right() + (jump_s if trio.current_time() > DISTURBED_AT_S else 0.0)

    vars(simulation)["wall_clock"] = jumping
    disturbed = account(simulation)
    assert disturbed.num_opened == quiet.num_opened
    assert disturbed.virtual_s == pytest.approx(quiet.virtual_s, rel=0.2)
    assert disturbed.calls["stored"] == pytest.approx(quiet.calls["stored"], abs=NUM_NODES)
    assert disturbed.calls["looked"] <= 2 * quiet.calls["looked"] + 10 * NUM_NODES
