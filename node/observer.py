"""The daemon's Observer: metrics, and news of every commit for status and watchdog."""

from __future__ import annotations

from collections.abc import Callable

from node.metrics import Metrics


class DaemonObserver:
    """Implements Observer."""

    def __init__(self, metrics: Metrics, on_commit: Callable[[int], None]) -> None:
        self._metrics = metrics
        self._on_commit = on_commit

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of docs/metrics.md."""
        self._metrics.count(name, amount, **labels)
        if name == "microbatches_committed":
            self._on_commit(int(amount))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of docs/metrics.md."""
        self._metrics.gauge(name, value, **labels)

    def event(self, name: str, **fields: object) -> None:
        """Log what happened."""
        self._metrics.event(name, **fields)
