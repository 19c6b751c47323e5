"""Parts of a node die or freeze, whole nodes freeze, a machine sleeps: training goes on."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from lifecycle_kit import (
    PATIENCE_S,
    TrainingSwarm,
    await_gone,
    child,
    children,
    counters,
    log_of,
    training,
)

from node.local_swarm import Daemon

pytestmark = pytest.mark.slow
# A frozen side-car is noticed by a call that is not answered (10 s) after a pause (3 s).
HEAL_S = 90.0


def is_whole(swarm: TrainingSwarm, name: str) -> bool:
    """Whether a node's side-car runs and a peer can read its record."""
    status = swarm[name].status()
    return status is not None and status.sidecar_up and status.registered


def restarts(daemon: Daemon) -> int:
    return int(counters(daemon)["sidecar_restarts"])


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("sidecar", signal.SIGKILL),
        ("p2pd", signal.SIGKILL),
        ("p2pd", signal.SIGSTOP),
        ("sidecar", signal.SIGSTOP),
    ],
)
def test_a_sidecar_is_replaced_while_training_goes_on(
    victim: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Of the volunteer and of the organiser, one after the other."""
    with training(tmp_path) as swarm:
        for name in ("stage-1-a", "data-1"):
            swarm.wait_until(lambda name=name: is_whole(swarm, name), f"{name} to be whole")
            before = children(swarm[name])
            child(swarm[name], victim).send_signal(number)
            first = swarm.step()
            swarm.wait_until(
                lambda name=name: restarts(swarm[name]) == 1, f"{name} to notice", HEAL_S
            )
            # a death is noticed before another step is done, a silence is not
            assert number == signal.SIGKILL or swarm.step() > first
            await_gone(before)
            swarm.wait_until(lambda name=name: is_whole(swarm, name), f"{name} to heal", HEAL_S)
            swarm.await_steps(2)
        assert [e for e in log_of(swarm["data-1"]) if e["event"] == "swarm_paused"] == []


def everything(swarm: TrainingSwarm) -> list[psutil.Process]:
    """All processes of a swarm, as a machine that falls asleep stops them."""
    daemons = [psutil.Process(daemon.pid) for daemon in swarm.daemons]
    return daemons + [each for daemon in swarm.daemons for each in children(daemon)]


@contextmanager
def asleep(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop all these processes, and let them go on whatever happens: stopped ones never end."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            process.resume()


def spent(swarm: TrainingSwarm) -> dict[str, Counter[str]]:
    """What each node has counted so far, and its lines of log."""
    sums = {}
    for daemon in swarm.daemons:
        sums[daemon.name] = counters(daemon)
        sums[daemon.name]["log_lines"] = len(
            [e for e in log_of(daemon) if e["event"] != "snapshot_saved"]
        )
    return sums


@pytest.mark.parametrize(
    "asleep_s",
    [
        20,  # longer than a silent session lives
        50,  # longer than any record, call or averaging
    ],
)
def test_a_machine_that_slept_goes_on_without_a_storm(asleep_s: int, tmp_path: Path) -> None:
    """In the 20 s after it woke a node logs and errs little and restarts its side-car once."""
    with training(tmp_path) as swarm:
        swarm.wait_until(lambda: all(is_whole(swarm, d.name) for d in swarm.daemons), "all whole")
        before, processes = spent(swarm), everything(swarm)
        with asleep(processes):
            time.sleep(asleep_s)
        swarm.await_steps(3, PATIENCE_S)
        time.sleep(20)
        swarm.await_steps(1)
        after = spent(swarm)
        for name, sums in after.items():
            new = sums - before[name]
            assert new["sidecar_restarts"] <= 1, new
            assert new["errors"] <= 20, new
            assert new["log_lines"] <= 30, new
        swarm.wait_until(
            lambda: all(is_whole(swarm, d.name) for d in swarm.daemons), "all whole again", HEAL_S
        )
