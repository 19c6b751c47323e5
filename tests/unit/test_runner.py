"""The worker thread's queue: order, cancellation, and what a job raises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from node.compute import PHASE, ThreadRunner
from protocol.ports import JOB_PRIORITY, JobKind
from protocol.simulation.trace import Trace, TracingObserver


@pytest.fixture
def observer() -> TracingObserver:
    return TracingObserver("runner", Trace())


@pytest.fixture
def runner(observer: TracingObserver) -> ThreadRunner:
    return ThreadRunner(observer)


class Held:
    """A job that starts, and ends when it is told to."""

    def __init__(self) -> None:
        self.has_started, self._may_end = trio.Event(), threading.Event()
        self.has_ended = False
        self._token = trio.lowlevel.current_trio_token()

    def __call__(self) -> str:
        self._token.run_sync_soon(self.has_started.set)
        assert self._may_end.wait(10)
        self.has_ended = True
        return "held"

    def release(self) -> None:
        self._may_end.set()


async def queue(
    nursery: trio.Nursery, runner: ThreadRunner, kind: JobKind, job: Callable[[], object]
) -> trio.CancelScope:
    """Start a caller and wait until its job is queued."""
    scope = trio.CancelScope()

    async def call() -> None:
        with scope:
            await runner.run(kind, job)

    nursery.start_soon(call)
    await wait_all_tasks_blocked()
    return scope


async def test_a_job_runs_off_the_event_loop_and_returns_its_result(runner: ThreadRunner) -> None:
    assert await runner.run("forward", threading.get_ident) != threading.get_ident()


async def test_jobs_run_by_priority_then_by_arrival(nursery, runner: ThreadRunner) -> None:
    seen: list[str] = []
    held = Held()
    nursery.start_soon(runner.run, "forward", held)
    await held.has_started.wait()
    kinds: list[JobKind] = ["embed", "forward", "edge", "backward", "commit", "backward"]
    for number, kind in enumerate(kinds):
        await queue(nursery, runner, kind, lambda n=number, k=kind: seen.append(f"{k}{n}"))
    held.release()
    await runner.run("embed", lambda: seen.append("last"))
    assert seen == ["commit4", "backward3", "backward5", "edge2", "forward1", "embed0", "last"]


async def test_the_mean_of_a_kind_is_that_of_the_jobs_themselves(runner: ThreadRunner) -> None:
    assert runner.mean_s("forward") is None
    await runner.run("forward", lambda: threading.Event().wait(0.2))
    first = runner.mean_s("forward")
    await runner.run("forward", lambda: None)
    second = runner.mean_s("forward")
    assert first is not None
    assert second is not None
    assert first >= 0.2
    assert 0.6 * first <= second < first
    assert runner.mean_s("backward") is None


async def test_one_job_at_a_time(nursery, runner: ThreadRunner) -> None:
    running = []

    def job() -> None:
        running.append(1)
        assert len(running) == 1
        running.pop()

    async with trio.open_nursery() as callers:
        for _ in range(20):
            callers.start_soon(runner.run, "forward", job)


async def test_a_cancelled_caller_takes_its_waiting_job_along(
    nursery, runner: ThreadRunner
) -> None:
    seen: list[str] = []
    held = Held()
    nursery.start_soon(runner.run, "forward", held)
    await held.has_started.wait()
    scope = await queue(nursery, runner, "commit", lambda: seen.append("cancelled"))
    await queue(nursery, runner, "forward", lambda: seen.append("kept"))
    scope.cancel()
    await wait_all_tasks_blocked()
    held.release()
    await runner.run("embed", lambda: None)
    assert seen == ["kept"]


async def test_a_job_that_started_goes_to_its_end_before_the_next(
    nursery, runner: ThreadRunner
) -> None:
    held = Held()
    scope = await queue(nursery, runner, "forward", held)
    await held.has_started.wait()
    scope.cancel()
    ended: list[bool] = []
    await queue(nursery, runner, "commit", lambda: ended.append(held.has_ended))
    assert ended == []
    held.release()
    await runner.run("embed", lambda: None)
    assert ended == [True]


async def test_a_caller_cancelled_as_its_turn_comes_passes_the_turn_on(
    nursery, runner: ThreadRunner
) -> None:
    held = Held()
    nursery.start_soon(runner.run, "forward", held)
    await held.has_started.wait()
    scopes = [await queue(nursery, runner, "forward", lambda: None) for _ in range(3)]
    runner._pass_turn()  # as the end of the held job would, in the same tick as
    for scope in scopes:
        scope.cancel()
    await wait_all_tasks_blocked()
    assert not runner._is_busy
    held.release()
    assert await runner.run("forward", lambda: 1) == 1


async def test_what_a_job_raises_reaches_its_caller_and_nobody_else(runner: ThreadRunner) -> None:
    def fail() -> None:
        raise KeyError("no such work")

    with pytest.raises(KeyError, match="no such work"):
        await runner.run("backward", fail)
    assert await runner.run("backward", lambda: 2) == 2


async def test_seconds_and_the_queue_are_measured(
    nursery, runner: ThreadRunner, observer: TracingObserver
) -> None:
    held = Held()
    nursery.start_soon(runner.run, "forward", held)
    await held.has_started.wait()
    await queue(nursery, runner, "forward", lambda: None)
    scope = await queue(nursery, runner, "forward", lambda: None)
    assert observer.gauges["queue_depth"] == 2
    scope.cancel()
    await wait_all_tasks_blocked()
    assert observer.gauges["queue_depth"] == 1
    held.release()
    await runner.run("embed", lambda: None)
    assert observer.gauges["queue_depth"] == 0
    assert observer.counts["seconds"] > 0


def test_every_kind_of_job_has_a_priority_and_a_phase() -> None:
    assert JOB_PRIORITY.keys() == PHASE.keys()
    assert JOB_PRIORITY["commit"] < JOB_PRIORITY["backward"] < JOB_PRIORITY["forward"]
