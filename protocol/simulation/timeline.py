"""Virtual time: one task runs the world's callbacks in order, and a trio run that repeats itself.

With ``MockClock(autojump_threshold=0)`` time stands still while any task can run and then jumps
to the next deadline, so an hour of idling costs microseconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Generic, TypeVar

import trio
import trio.testing
from trio._core import _run as core

T = TypeVar("T")


class Timeline:
    """Callbacks at virtual times, run by one task in order of (time, insertion)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._sleep = trio.CancelScope()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` once, ``delay_s`` from now."""
        self.at(trio.current_time() + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` once at virtual time ``time_s``, never inside the caller."""
        heapq.heappush(self._heap, (time_s, next(self._order), action))
        self._sleep.deadline = min(self._sleep.deadline, time_s)

    async def run(self) -> None:
        """Run what falls due, until cancelled. An exception in an action is a bug and ends it."""
        while True:
            while self._heap and self._heap[0][0] <= trio.current_time():
                heapq.heappop(self._heap)[2]()
            with trio.CancelScope() as self._sleep:
                if self._heap:
                    self._sleep.deadline = self._heap[0][0]
                await trio.sleep_forever()


class Outcome(Generic[T]):
    """A result that a callback will deliver to a waiting task; the first one given counts."""

    def __init__(self) -> None:
        self._event = trio.Event()
        self._result: Callable[[], T]

    @property
    def is_settled(self) -> bool:
        """Whether a result or an error was given."""
        return self._event.is_set()

    def succeed(self, value: T) -> None:
        """Give the result."""
        self._settle(lambda: value)

    def fail(self, error: BaseException) -> None:
        """Give an error, which ``wait`` raises."""

        def raise_it() -> T:
            raise error

        self._settle(raise_it)

    def _settle(self, result: Callable[[], T]) -> None:
        if not self.is_settled:
            self._result = result
            self._event.set()

    async def wait(self) -> T:
        """Return the result or raise the error."""
        await self._event.wait()
        return self._result()


def run_virtual(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run ``main`` in virtual time; the same seed gives the same order of all events.

    trio shuffles the tasks that are ready at one moment. Its Hypothesis plug-in makes the shuffle
    repeatable through two private names; this is the only place that uses them.
    """
    before, state = core._ALLOW_DETERMINISTIC_SCHEDULING, core._r.getstate()
    core._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    core._r.seed(seed)
    try:
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        core._ALLOW_DETERMINISTIC_SCHEDULING = before  # type: ignore[misc]
        core._r.setstate(state)
