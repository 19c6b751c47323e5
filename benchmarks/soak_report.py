"""Turns the samples of a soak into slopes, verdicts and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from node_processes import MIB, Held

from node.journal import MAX_FILE_BYTES as JOURNAL_BYTES
from node.logs import MAX_FILE_BYTES as LOG_BYTES
from node.logs import NUM_OLD_FILES

WARM_UP_SHARE = 0.25
# What may be gained in the measured time and still counts as flat.
SLACK = {"rss_mib": 4.0, "uss_mib": 4.0, "files": 2.0, "threads": 1.0}
SLACK_SHARE = 0.02
LOG_LIMITS = {
    "log.jsonl": (1 + NUM_OLD_FILES) * LOG_BYTES,
    "steps.jsonl": 2 * JOURNAL_BYTES,
    "decisions.jsonl": 2 * JOURNAL_BYTES,
}
Point = tuple[float, float]


@dataclass
class Sample:
    """All nodes at one moment: processes and sizes of logs, by name of the node and its own."""

    at_s: float
    step: int
    processes: dict[str, Held] = field(default_factory=dict)
    logs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Course:
    """How one quantity went: at the start and end of the measured time, and its slope an hour."""

    first: float
    last: float
    per_hour: float
    gained: float

    @classmethod
    def through(cls, points: Sequence[Point]) -> Course:
        """Fit points of (seconds, value)."""
        slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
        slope = statistics.median(slopes) if slopes else 0.0
        window_s = points[-1][0] - points[0][0]
        few = max(1, len(points) // 5)
        return cls(
            first=statistics.median(value for _, value in points[:few]),
            last=statistics.median(value for _, value in points[-few:]),
            per_hour=slope * 3600,
            gained=slope * window_s,
        )

    def is_flat(self, slack: float) -> bool:
        """Whether by its slope it gained no more than noise."""
        return self.gained <= max(slack, SLACK_SHARE * self.first)


@dataclass
class Soak:
    """A whole run."""

    minutes: float
    samples: list[Sample] = field(default_factory=list)

    @property
    def measured(self) -> list[Sample]:
        """The samples after the warm-up."""
        return self.samples[int(len(self.samples) * WARM_UP_SHARE) :]

    @property
    def steps(self) -> int:
        """Steps of the measured time."""
        return self.measured[-1].step - self.measured[0].step

    def courses(self, name: str) -> dict[str, Course]:
        """The courses of one field of Held, by process; of those that lived all the time."""
        return self._fit(lambda sample: {k: getattr(h, name) for k, h in sample.processes.items()})

    def log_courses(self) -> dict[str, Course]:
        """The courses of the sizes of log files, in bytes."""
        return self._fit(lambda sample: dict(sample.logs))

    def _fit(self, read: Callable[[Sample], dict[str, float]]) -> dict[str, Course]:
        readings = [(sample.at_s, read(sample)) for sample in self.measured]
        keys = [key for key in readings[0][1] if all(key in reading for _, reading in readings)]
        return {key: Course.through([(t, reading[key]) for t, reading in readings]) for key in keys}

    def not_flat(self) -> list[str]:
        """Name everything that grew, and every log that no limit bounds."""
        found = [
            f"{name} of {key}: {course.gained:+.1f} in {self._window_s / 60:.0f} min"
            for name, slack in SLACK.items()
            for key, course in self.courses(name).items()
            if not course.is_flat(slack)
        ]
        return found + [
            f"{key} has no limit: {course.per_hour / MIB:+.1f} MiB/h"
            for key, course in self.log_courses().items()
            if course.gained > 0 and key.split(" ")[1] not in LOG_LIMITS
        ]

    @property
    def _window_s(self) -> float:
        return self.measured[-1].at_s - self.measured[0].at_s

    def progress(self) -> str:
        """One line about the last sample."""
        sample = self.samples[-1]
        told = ", ".join(f"{k} {h.uss_mib:.0f}" for k, h in sample.processes.items())
        return f"{sample.at_s:.0f} s, step {sample.step}, USS MiB: {told}"

    def summary(self) -> dict[str, object]:
        """The object that --json prints."""
        return {
            "minutes": self.minutes,
            "steps": self.steps,
            "not_flat": self.not_flat(),
            "per_hour": {
                name: {key: round(c.per_hour, 2) for key, c in self.courses(name).items()}
                for name in SLACK
            },
            "log_bytes_per_step": {
                key: round(c.gained / max(1, self.steps)) for key, c in self.log_courses().items()
            },
        }

    def markdown(self) -> str:
        """The recorded page."""
        grown = self.not_flat()
        lines = [
            "# Soak",
            "",
            f"Written by `python benchmarks/soak.py --minutes {self.minutes:g} --write`. One data",
            "node and 2 stages x 2 holders of a tiny model, all at nice 10 on a computer that may",
            f"have had other work; {len(self.samples)} samples. The first",
            f"{WARM_UP_SHARE:.0%} are warm-up; of the rest, {self._window_s / 60:.1f} minutes and",
            f"{self.steps} steps: median of the first and last fifth, and slope per hour.",
            "",
            "**Not flat:** " + "; ".join(grown) if grown else "**All flat.**",
            "",
            "| process | RSS MiB | per h | USS MiB | per h | files | per h | threads | per h |",
            f"|{'---|' * 9}",
            *self._process_rows(),
            "",
            "| log | KiB at the end | bytes per step | limit MiB |",
            f"|{'---|' * 4}",
            *self._log_rows(),
        ]
        return "\n".join(lines) + "\n"

    def _process_rows(self) -> list[str]:
        table = {name: self.courses(name) for name in SLACK}
        rows = []
        for key in table["rss_mib"]:
            cells = []
            for name in SLACK:
                course = table[name][key]
                digits = 1 if name.endswith("mib") else 0
                cells.append(f"{course.first:.{digits}f} → {course.last:.{digits}f}")
                cells.append(f"{course.per_hour:+.1f}")
            rows.append(f"| {key} | {' | '.join(cells)} |")
        return rows

    def _log_rows(self) -> list[str]:
        rows = []
        for key, course in self.log_courses().items():
            limit = LOG_LIMITS.get(key.split(" ")[1])
            bound = f"{limit / MIB:.0f}" if limit else "none"
            per_step = course.gained / max(1, self.steps)
            rows.append(f"| {key} | {course.last / 1024:.1f} | {per_step:.0f} | {bound} |")
        return rows
