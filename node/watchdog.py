"""Watches the event loop and the node's progress: a hung node must look hung."""

from __future__ import annotations

import trio

from protocol.ports import Observer

STALL_S = 1.0


class Progress:
    """When the node last finished some work, on trio's clock."""

    def __init__(self) -> None:
        self._marked_at: float | None = None

    def mark(self) -> None:
        """Some work is finished."""
        self._marked_at = trio.current_time()

    @property
    def age_s(self) -> float | None:
        """Seconds since the last work, or None if there was none yet."""
        return None if self._marked_at is None else trio.current_time() - self._marked_at


async def watch(observer: Observer, progress: Progress, interval_s: float = 0.5) -> None:
    """Measure until cancelled how late the loop wakes this task, and how old progress is."""
    while True:
        due = trio.current_time() + interval_s
        await trio.sleep_until(due)
        lag_s = trio.current_time() - due
        observer.gauge("loop_lag_seconds", lag_s)
        if lag_s >= STALL_S:
            observer.event("event_loop_stalled", seconds=round(lag_s, 3))
        if progress.age_s is not None:
            observer.gauge("progress_age_seconds", progress.age_s)
