"""Ctrl-C for a command that must clean up: the first interrupts, the next ones hurry."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While entered, the first SIGINT or SIGTERM raises KeyboardInterrupt, later ones do not.

    So the clean-up that the first one causes cannot itself be interrupted half-way.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hurry: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in _NUMBERS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt
        self.hurry()
