"""Virtual time, the runner, the registry and the fault injector of the simulation kit."""

from __future__ import annotations

from random import Random

import pytest
import trio

from protocol.errors import SidecarError
from protocol.records import NodeRecord
from protocol.simulation.faults import (
    ACTIONS,
    POINTS,
    Fault,
    FaultInjector,
    SimulatedFaultPoints,
    random_script,
)
from protocol.simulation.host import VirtualHost, simulation_key
from protocol.simulation.registry import VirtualRegistry
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.timeline import Outcome, Timeline, run_virtual

PEER = simulation_key(0).peer_id
COSTS = {
    "embed": 1.0,
    "forward": 1.0, "backward": 2.0, "edge": 1.0, "commit": 0.5, "update": 3.0, "state": 1.0,
}  # fmt: skip


@pytest.fixture
async def host(nursery) -> VirtualHost:
    timeline = Timeline()
    nursery.start_soon(timeline.run)
    await trio.testing.wait_all_tasks_blocked()
    return VirtualHost("n0", PEER, timeline, cost_s=COSTS)


async def test_the_timeline_runs_by_time_then_by_insertion(
    autojump_clock, host: VirtualHost
) -> None:
    seen: list[tuple[float, str]] = []

    def note(name: str):
        return lambda: seen.append((trio.current_time(), name))

    host.timeline.after(2, note("late"))
    host.timeline.after(1, note("first"))
    host.timeline.after(1, note("second"))
    await trio.sleep(3)
    assert seen == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


async def test_the_first_result_of_an_outcome_counts() -> None:
    outcome: Outcome[int] = Outcome()
    outcome.succeed(1)
    outcome.fail(ValueError())
    assert await outcome.wait() == 1


async def order_of_many_tasks() -> str:
    seen: list[str] = []

    async def task(name: str) -> None:
        for _ in range(3):
            await trio.sleep(1)
            seen.append(name)

    async with trio.open_nursery() as nursery:
        for name in "abcdefgh":
            nursery.start_soon(task, name)
    return "".join(seen)


def test_a_seed_fixes_the_order_of_tasks_and_seeds_differ() -> None:
    assert run_virtual(order_of_many_tasks, 1) == run_virtual(order_of_many_tasks, 1)
    assert len({run_virtual(order_of_many_tasks, seed) for seed in range(5)}) == 5


# --- runner --------------------------------------------------------------------------------


async def finish_times(host: VirtualHost, kinds: list[str]) -> list[tuple[str, float]]:
    runner, seen = VirtualRunner(host), []

    async def submit(kind: str) -> None:
        await runner.run(kind, lambda: seen.append((kind, trio.current_time())))

    async with trio.open_nursery() as nursery:
        for kind in kinds:
            nursery.start_soon(submit, kind)
            await trio.testing.wait_all_tasks_blocked()
    return seen


async def test_jobs_run_one_at_a_time_and_gradients_go_first(
    autojump_clock, host: VirtualHost
) -> None:
    kinds = ["forward", "forward", "edge", "backward", "commit"]
    assert await finish_times(host, kinds) == [
        ("forward", 1.0), ("commit", 1.5), ("backward", 3.5), ("edge", 4.5), ("forward", 5.5),
    ]  # fmt: skip


async def test_a_fast_node_takes_less_time_and_a_frozen_one_more(
    autojump_clock, host: VirtualHost
) -> None:
    host.speed = 2.0
    assert await finish_times(host, ["update"]) == [("update", 1.5)]
    host.freeze(10.0)
    assert await finish_times(host, ["update"]) == [("update", 11.5)]


async def test_slowness_ends(autojump_clock, host: VirtualHost) -> None:
    host.slow_down(4.0, 3.0)
    assert await finish_times(host, ["forward"]) == [("forward", 4.0)]
    assert await finish_times(host, ["forward"]) == [("forward", 5.0)]


async def test_a_cancelled_caller_stops_a_waiting_job_and_not_a_started_one(
    autojump_clock, host: VirtualHost
) -> None:
    runner, seen = VirtualRunner(host), []
    async with trio.open_nursery() as nursery:
        for name in ("started", "waiting"):
            nursery.start_soon(runner.run, "forward", lambda name=name: seen.append(name))
            await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    await trio.sleep(5)
    assert seen == ["started"]
    assert await runner.run("forward", lambda: 7) == 7


async def test_an_error_reaches_the_caller_alone(autojump_clock, host: VirtualHost) -> None:
    runner = VirtualRunner(host)
    with pytest.raises(ZeroDivisionError):
        await runner.run("forward", lambda: 1 / 0)
    assert await runner.run("forward", lambda: 1) == 1


async def test_a_dead_computer_computes_nothing(autojump_clock, host: VirtualHost) -> None:
    seen: list[int] = []
    with trio.move_on_after(5):
        host.timeline.after(0.5, host.die)
        await VirtualRunner(host).run("forward", lambda: seen.append(1))
    assert seen == []


# --- registry ------------------------------------------------------------------------------


def record(sequence: int, expires_at: float = 100.0) -> NodeRecord:
    return NodeRecord(
        swarm="0" * 64,
        peer_id=PEER,
        sidecar_id=PEER,
        stage=1,
        addresses=("/memory/x",),
        sequence=sequence,
        expires_at=expires_at,
        protocol_version=1,
    )


async def test_records_show_late_and_the_newest_wins_until_it_expires(
    autojump_clock, host: VirtualHost
) -> None:
    table = VirtualRegistry(trio.current_time, delay_s=0.1, staleness_s=2.0)
    registry = table.attach(host)
    await registry.publish(record(2))
    assert list(await registry.nodes()) == []
    await trio.sleep(2)
    await registry.publish(record(1))
    await trio.sleep(3)
    assert [r.sequence for r in await registry.nodes()] == [2]
    await trio.sleep(100)
    assert list(await registry.nodes()) == []


async def test_a_registry_that_is_down_says_so(autojump_clock, host: VirtualHost) -> None:
    registry = VirtualRegistry(trio.current_time, is_down=True).attach(host)
    with pytest.raises(SidecarError):
        await registry.nodes()


# --- faults --------------------------------------------------------------------------------


async def test_a_fault_strikes_at_its_point_step_and_occurrence_once(
    autojump_clock, host: VirtualHost
) -> None:
    fault = Fault("slow", node=0, point="after_commit", step=2, occurrence=2)
    struck: list[Fault] = []
    points = SimulatedFaultPoints(0, host, FaultInjector([fault], struck.append))
    for point, step in [("after_commit", 1), ("before_close", 2), ("after_commit", 2)]:
        await points.reach(point, step)
    assert struck == []
    for _ in range(2):
        await points.reach("after_commit", 2)
        assert struck == [fault]
    with pytest.raises(ValueError):
        await points.reach("on_a_whim", 2)


async def test_a_killed_node_does_not_pass_the_point(autojump_clock, host: VirtualHost) -> None:
    injector = FaultInjector([Fault("kill", 0, "in_reduce")], lambda _: host.die())
    with trio.move_on_after(10) as scope:
        await SimulatedFaultPoints(0, host, injector).reach("in_reduce", 0)
    assert scope.cancelled_caught


async def test_a_frozen_node_passes_the_point_after_its_thaw(
    autojump_clock, host: VirtualHost
) -> None:
    injector = FaultInjector([Fault("freeze", 0, "in_reduce")], lambda _: host.freeze(4.0))
    await SimulatedFaultPoints(0, host, injector).reach("in_reduce", 0)
    assert trio.current_time() == 4.0


def test_random_scripts_repeat_and_use_every_action_and_point() -> None:
    def draw(seed: int) -> tuple[Fault, ...]:
        return random_script(Random(seed), 8, 4)

    assert draw(5) == draw(5)
    faults = [fault for seed in range(300) for fault in draw(seed)]
    assert {fault.action for fault in faults} == set(ACTIONS)
    assert {fault.point for fault in faults} == {*POINTS, None}
    assert {fault.node for fault in faults} == set(range(8))
