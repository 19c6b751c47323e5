"""The simulated compute thread: jobs cost virtual time, then run inline."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, TypeVar

from protocol.ports import JOB_PRIORITY, JobKind
from protocol.simulation.host import VirtualHost
from protocol.simulation.timeline import Outcome

T = TypeVar("T")


class VirtualRunner:
    """One job at a time; ready jobs start by priority, then in order of arrival."""

    def __init__(self, host: VirtualHost) -> None:
        self._host = host
        self._order = count()
        self._queue: list[tuple[int, int, JobKind, Callable[[], Any], Outcome[Any]]] = []
        self._is_busy = False
        self.busy_s = 0.0

    async def run(self, kind: JobKind, job: Callable[[], T]) -> T:
        """Queue ``job`` and return its result; a job that is cancelled before it starts is not run.

        Its effect takes place at the end of its virtual time, even if the caller has gone.
        """
        outcome: Outcome[T] = Outcome()
        entry = (JOB_PRIORITY[kind], next(self._order), kind, job, outcome)
        heapq.heappush(self._queue, entry)
        self._start_next()
        try:
            return await outcome.wait()
        finally:
            if entry in self._queue:
                self._queue.remove(entry)
                heapq.heapify(self._queue)

    def mean_s(self, kind: JobKind) -> float | None:
        """How long such a job takes now."""
        return self._host.cost_s[kind] / self._host.speed

    def _start_next(self) -> None:
        if self._is_busy or not self._queue:
            return
        self._is_busy = True
        _, _, kind, job, outcome = heapq.heappop(self._queue)
        cost_s = self._host.cost_s[kind] / self._host.speed
        self.busy_s += cost_s
        finish = partial(self._host.when_awake, partial(self._finish, job, outcome))
        self._host.timeline.after(cost_s, finish)

    def _finish(self, job: Callable[[], Any], outcome: Outcome[Any]) -> None:
        # A worker thread hands every exception to whoever waits for the job; so does this.
        try:
            outcome.succeed(job())
        except Exception as error:
            outcome.fail(error)
        self._is_busy = False
        self._start_next()
