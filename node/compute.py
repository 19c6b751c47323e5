"""The Runner of the daemon: one job at a time in a worker thread, so that the loop stays free."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

import torch
import trio

from protocol.ports import JOB_PRIORITY, JobKind, Observer

T = TypeVar("T")

_KEEP = 0.6  # of the mean; the rest is the latest job
PHASE: dict[JobKind, str] = {
    "commit": "update",
    "update": "update",
    "state": "update",
    "backward": "backward",
    "edge": "edge",
    "forward": "forward",
    "embed": "edge",
}


def use_threads(threads: int) -> None:
    """Give torch this many threads; with several nodes on a computer it must be one each."""
    torch.set_num_threads(threads)


class ThreadRunner:
    """Runs jobs in order of priority, then of arrival. A job that started cannot be cancelled."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._queue: list[tuple[int, int, trio.Event]] = []
        self._numbers = count()
        self._is_busy = False
        self._idle_since = time.perf_counter()
        self._limiter = trio.CapacityLimiter(1)
        self._means_s: dict[JobKind, float] = {}

    async def run(self, kind: JobKind, job: Callable[[], T]) -> T:
        """Run ``job`` when its turn comes and return its result."""
        await self._take_turn(kind)
        started = time.perf_counter()
        try:
            return await trio.to_thread.run_sync(job, limiter=self._limiter)
        finally:
            seconds = time.perf_counter() - started
            before = self._means_s.get(kind, seconds)
            self._means_s[kind] = _KEEP * before + (1 - _KEEP) * seconds
            self._observer.count("seconds", seconds, phase=PHASE[kind])
            self._pass_turn()

    def mean_s(self, kind: JobKind) -> float | None:
        """How long a job of this kind takes of late, without its waiting; None if none ran."""
        return self._means_s.get(kind)

    async def _take_turn(self, kind: JobKind) -> None:
        if not self._is_busy:
            self._is_busy = True
            waited_s = time.perf_counter() - self._idle_since
            self._observer.count("seconds", waited_s, phase="waiting")
            return
        ticket = (JOB_PRIORITY[kind], next(self._numbers), trio.Event())
        heapq.heappush(self._queue, ticket)
        self._measure()
        try:
            await ticket[2].wait()
        except trio.Cancelled:
            self._withdraw(ticket)
            raise

    def _withdraw(self, ticket: tuple[int, int, trio.Event]) -> None:
        if ticket[2].is_set():
            self._pass_turn()
        else:
            self._queue.remove(ticket)
            heapq.heapify(self._queue)
            self._measure()

    def _pass_turn(self) -> None:
        if self._queue:
            heapq.heappop(self._queue)[2].set()
            self._measure()
        else:
            self._is_busy = False
            self._idle_since = time.perf_counter()

    def _measure(self) -> None:
        self._observer.gauge("queue_depth", len(self._queue), queue="compute")
