"""The processes of a node seen from outside: which there are, what they hold and spend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil

MIB = 2**20


@dataclass(frozen=True)
class Held:
    """What one process holds at one moment. USS is its own, PSS has its share of what is shared."""

    rss_mib: float
    uss_mib: float
    pss_mib: float
    files: int
    threads: int
    cpu_s: float


def processes_of(daemon_pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the daemon of a node and what it started, each with its kind."""
    daemon = psutil.Process(daemon_pid)
    yield "daemon", daemon
    for child in daemon.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            yield _kind(child), child


def held_by(process: psutil.Process) -> Held:
    """Look at a process; raise psutil.NoSuchProcess if it has ended."""
    with process.oneshot():
        memory, times = process.memory_full_info(), process.cpu_times()
        return Held(
            memory.rss / MIB,
            memory.uss / MIB,
            memory.pss / MIB,
            process.num_fds(),
            process.num_threads(),
            times.user + times.system,
        )


def look_at(daemon_pid: int) -> dict[str, Held]:
    """What each process of a node holds, by kind; two of a kind are told apart by a number."""
    found: dict[str, Held] = {}
    for kind, process in processes_of(daemon_pid):
        same = sum(name.split(" ")[0] == kind for name in found)
        with suppress(psutil.NoSuchProcess):
            found[f"{kind} {same + 1}" if same else kind] = held_by(process)
    return found


def _kind(process: psutil.Process) -> str:
    if process.name().startswith("python"):
        return "side-car"
    return process.name()
