"""Telling any number of waiting tasks that something changed."""

from __future__ import annotations

from collections.abc import Callable

import trio


class Signal:
    """Wakes everybody who waits at the time of ``notify``; the waiter looks for itself."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        """Wait for the next ``notify``."""
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; it is looked at after every ``notify``."""
        while not condition():
            await self._event.wait()
