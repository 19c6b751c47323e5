"""Virtual time: what is to happen when, in order of (time, insertion)."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Agenda:
    """An event heap. Equal times keep the order in which they were noted."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_noted = 0

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` once, ``delay_s`` from now, never inside the caller."""
        self.at(self.now + delay_s, action)

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` once at ``time_s``."""
        self._num_noted += 1
        heapq.heappush(self._events, (time_s, self._num_noted, action))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Let things happen until ``until()``, or until ``limit_s`` or the end of all events."""
        while self._events and not until() and self._events[0][0] <= limit_s:
            self.now, _, action = heapq.heappop(self._events)
            action()
