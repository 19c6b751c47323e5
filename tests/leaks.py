"""Finds what a test left behind: processes, threads, sockets and files."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

GRACE_S = 3.0
# Opened once by the interpreter or a library and kept for its own use.
KEPT_BY_LIBRARIES = ("/dev/", "/proc/", "/sys/", "/usr/", "/memfd:")

OpenFile = tuple[int, str]


# By mark: processes whose environment was read and lacks it. Reading all each time takes too long.
_strangers: dict[str, set[int]] = {}


def our_processes(mark: str) -> set[psutil.Process]:
    """Return this process's children, and all processes with ``mark`` in their environment.

    A child of a killed daemon hangs under init: only its environment tells whose it is.
    """
    found = set()
    for pid in _children() | _marked(mark):
        with suppress(psutil.Error):
            found.add(psutil.Process(pid))
    return found


def _children() -> set[int]:
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):
            pids.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return pids


def _marked(mark: str) -> set[int]:
    pids = set(psutil.pids()) - {os.getpid()}
    strangers = _strangers.setdefault(mark, set())
    strangers &= pids
    ours = set()
    for pid in pids - strangers:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if mark.encode() in environment:
            ours.add(pid)
        else:
            strangers.add(pid)
    return ours


def end_new_processes(before: set[psutil.Process], mark: str) -> list[str]:
    """Give new processes ``GRACE_S`` to end; kill and describe those that did not."""
    new = our_processes(mark) - before
    if not new:
        return []
    psutil.wait_procs(_running(new), timeout=GRACE_S)
    alive = _running(new)
    described = [_describe(process) for process in alive]
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(_running(alive), timeout=GRACE_S)
    return described


def _running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Leave out zombies: they have ended, and init reaps orphans when it likes."""
    running = []
    for process in processes:
        with suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                running.append(process)
    return running


def _describe(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:120]})"
    except psutil.Error:
        return f"process {process.pid}"


def threads() -> set[threading.Thread]:
    """Return the threads that would keep the interpreter from ending."""
    return {thread for thread in threading.enumerate() if not thread.daemon}


def new_threads(before: set[threading.Thread]) -> list[str]:
    """Describe the non-daemon threads that are still alive after ``GRACE_S``."""
    new = threads() - before
    for thread in new:
        thread.join(GRACE_S)
    return [f"thread {thread.name}" for thread in new if thread.is_alive()]


def open_files() -> set[OpenFile]:
    """Return (descriptor, target) of all that this process has open."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.add((int(entry), os.readlink(f"/proc/self/fd/{entry}")))
    return {(fd, target) for fd, target in found if not target.startswith(KEPT_BY_LIBRARIES)}


def new_files(before: set[OpenFile]) -> list[str]:
    """Describe sockets, pipes and files opened since; cycles get one collection to let go."""
    if open_files() - before:
        gc.collect()
    return [f"descriptor {fd} -> {target}" for fd, target in sorted(open_files() - before)]
