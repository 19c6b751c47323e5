"""What a simulated run gives: seconds per step, wasted computing, messages, recoveries."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from protocol.simulation.training.machine import Span


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One finished step."""

    step: int
    start_s: float
    end_s: float
    aggregation_s: float
    microbatches: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class CrashEvent:
    """A node that died."""

    node: int
    stage: int
    time_s: float


@dataclass(slots=True)
class Outcome:
    """A whole run. ``counts``: forward resends, repairs, lost sums, restarts, spared, ..."""

    policy: str
    steps: list[StepOutcome] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    crashes: list[CrashEvent] = field(default_factory=list)
    stages: dict[int, int] = field(default_factory=dict)
    lives: dict[int, tuple[float, float]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    is_complete: bool = True

    @property
    def seconds(self) -> list[float]:
        """The seconds of each step."""
        return [step.seconds for step in self.steps]

    @property
    def microbatches(self) -> int:
        """How many microbatches were committed in finished steps."""
        return sum(step.microbatches for step in self.steps)

    @property
    def computed_s(self) -> float:
        """Seconds that all nodes together computed."""
        return sum(span.end_s - span.start_s for span in self.spans)

    @property
    def wasted_s(self) -> float:
        """Seconds of computing that no step's sums contain."""
        return sum(span.end_s - span.start_s for span in self.spans if not span.is_useful)

    def summary(self) -> dict[str, object]:
        """Return the numbers of a run as JSON has them."""
        seconds = self.seconds
        return {
            "policy": self.policy,
            "is_complete": self.is_complete,
            "steps": len(seconds),
            "step_s": {
                "mean": statistics.fmean(seconds) if seconds else None,
                "median": statistics.median(seconds) if seconds else None,
                "p95": percentile(seconds, 0.95) if seconds else None,
            },
            "microbatches": self.microbatches,
            "wasted_s": self.wasted_s,
            "wasted_share": self.wasted_s / self.computed_s if self.computed_s else 0.0,
            "messages": self.counts["messages"],
            "transfers": self.counts["transfers"],
            "crashes": len(self.crashes),
            "spared": self.counts["spared"],
            "recoveries": {
                name: self.counts[name] for name in ("resends", "repairs", "lost_sums", "restarts")
            },
        }


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of them lie, interpolated."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
