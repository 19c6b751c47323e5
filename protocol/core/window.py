"""How many microbatches a data node has under way at once, while that limit changes."""

from __future__ import annotations

from collections.abc import Callable

from protocol.core.signal import Signal


class Window:
    """Like a semaphore whose ``limit`` is asked anew whenever ``changed`` is notified.

    When it falls, what is under way goes on and nothing new begins.
    """

    def __init__(self, limit: Callable[[], int], changed: Signal) -> None:
        self._limit, self._changed = limit, changed
        self.num_open = 0

    async def acquire(self) -> None:
        """Wait for a place and take it."""
        await self._changed.until(lambda: self.num_open < self._limit())
        self.num_open += 1

    def release(self) -> None:
        """Give a place back."""
        self.num_open -= 1
        self._changed.notify()
