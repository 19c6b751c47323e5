"""The trace of a simulated run: what happened, where and when; equal for equal seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple

import trio


class TraceEntry(NamedTuple):
    """Something that happened to ``who`` at a virtual time, with its details in a fixed order."""

    time_s: float
    who: str
    what: str
    details: tuple[object, ...]


class Trace:
    """All entries of a run in order."""

    def __init__(self) -> None:
        self.entries: list[TraceEntry] = []

    def add(self, who: str, what: str, *details: object) -> None:
        """Note that ``what`` happened to ``who`` now."""
        self.entries.append(TraceEntry(trio.current_time(), who, what, details))

    def find(self, what: str) -> Iterator[TraceEntry]:
        """Yield the entries of one kind."""
        return (entry for entry in self.entries if entry.what == what)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all entries."""
        sink = sha256()
        for entry in self.entries:
            sink.update(repr(tuple(entry)).encode())
        return sink.hexdigest()


class TracingObserver:
    """A node's observer: events go to the trace, numbers are kept for the test to read."""

    def __init__(self, name: str, trace: Trace) -> None:
        self._name, self._trace = name, trace
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter; labels are summed over."""
        self.counts[name] += amount  # type: ignore[assignment]

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Keep the last value of a gauge."""
        self.gauges[name] = value

    def event(self, name: str, **fields: object) -> None:
        """Add an event of the node to the trace."""
        self._trace.add(self._name, name, *fields.items())
