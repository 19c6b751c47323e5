"""The node's metrics: one declared table, counted where things happen.

No label ever names a peer, a swarm or a microbatch, and each takes a bounded set of values.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import disable_created_metrics as _disable_created_metrics

from node.logs import Fields, log_event
from node.status import Problem
from protocol.errors import PeerError, ShoalError

PREFIX = "shoal_"
OTHER = "other"
MAX_LABEL_VALUES = 64
_HOUR_MINUTES = 60
_PLAIN_VALUE = re.compile(r"[a-z0-9_]{1,32}")


def error_classes(root: type[ShoalError] = ShoalError) -> list[type[ShoalError]]:
    """Return the tree of protocol/errors.py, each class before those below it."""
    below = [cls for cls in root.__subclasses__() if cls.__module__ == ShoalError.__module__]
    return [root, *(cls for child in below for cls in error_classes(child))]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of docs/metrics.md; a counter is exposed with ``_total`` after its name."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    unit: str
    help: str

    @property
    def exposed(self) -> str:
        """The name that Prometheus sees."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, unit: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "counter", labels, unit, help_)


def _gauge(name: str, unit: str, help_: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, "gauge", labels, unit, help_)


METRICS: tuple[MetricSpec, ...] = (
    _counter("microbatches_committed", "microbatches", "Microbatches that count.", "stage"),
    _counter("microbatches_reissued", "microbatches", "Tries that another one replaced."),
    _counter("path_repairs", "hops", "Lost or silent next hops that this node replaced."),
    _counter(
        "microbatches_recomputed", "microbatches", "Microbatches computed again after a loss."
    ),
    _counter("stages_rebuilt", "stages", "Times this node made a lost stage out of others."),
    _counter("tokens", "tokens", "Tokens of committed microbatches."),
    _counter("seconds", "seconds", "Time spent in each phase of the step.", "phase"),
    _counter("bytes", "bytes", "Bytes of frames on the data plane.", "kind", "direction"),
    _counter("frames", "frames", "Frames on the data plane.", "kind", "direction"),
    _counter("errors", "errors", "Errors by code; docs/troubleshooting.md explains each.", "code"),
    _counter("hops", "microbatches", "Next hops chosen: by a flow, or beside the flows.", "choice"),
    _counter("reroutings", "changes", "Times the flows through this node changed, by ticks."),
    _counter("sidecar_restarts", "restarts", "Times the DHT side-car was started again."),
    _counter("terms", "terms", "Decisions that replaced another one of the same step."),
    _counter("rollbacks", "rollbacks", "Times that the swarm went back to an older step."),
    _gauge("step", "steps", "Optimiser steps in this node's state."),
    _gauge("loss", "nats", "Mean training loss per token of the last step."),
    _gauge("validation_loss", "nats", "Mean loss per token on held-out text."),
    _gauge("stage", "index", "The stage that this node serves; 0 is a data node, -1 none."),
    _gauge("peers", "sessions", "Peers whose session is up."),
    _gauge("queue_depth", "items", "Items that wait in each queue.", "queue"),
    _gauge("clock_offset_seconds", "seconds", "How far peers' clocks are ahead, the middle one."),
    _gauge("loop_lag_seconds", "seconds", "How late the event loop last woke up."),
    _gauge("sidecar_up", "boolean", "1 while the DHT side-car answers."),
    _gauge(
        "paused",
        "boolean",
        "1 while a stage has no holder with its state.",
    ),
    _gauge("registered", "boolean", "1 while another peer can read this node's record."),
    _gauge("update_norm", "norm", "L2 norm of the last update of this stage's weights."),
    _gauge("gradient_norm", "norm", "L2 norm of this stage's last averaged gradient."),
    _gauge("state_bytes", "bytes", "Size of this stage's weights and optimiser state."),
    _gauge("pins", "pins", "Steps whose weights this node keeps for who generates or exports."),
    _gauge("pinned_bytes", "bytes", "Memory that those, with their caches, may come to take."),
    _gauge("flows", "microbatches", "Units of flow that arrive here and leave.", "direction"),
    _gauge("flows_wanted", "microbatches", "Units of flow that this data node wants; else 0."),
    _gauge("flow_cost_seconds", "seconds", "Mean cost of those flows to their data node."),
    _gauge("capacity_used", "ratio", "Share of the microbatches this node can keep at once."),
    _gauge("progress_age_seconds", "seconds", "Time since this node last finished some work."),
)

LABEL_VALUES: dict[str, frozenset[str]] = {
    "phase": frozenset(
        {"forward", "backward", "edge", "update", "averaging", "waiting", "routing"}
    ),
    "choice": frozenset({"flow", "beside"}),
    "direction": frozenset({"in", "out"}),
    "code": frozenset(cls.code for cls in error_classes()),
}
_PEERS_FAULTS = frozenset(cls.code for cls in error_classes(PeerError))
_MEANINGS = {cls.code: (cls.__doc__ or "").splitlines()[0] for cls in error_classes()}


class Metrics:
    """The Observer of the daemon, and what ``status`` tells about the last hour.

    An unknown name or label raises: it is a bug, and the table is the contract. An unknown value
    of a label is counted under ``other``: some come from peers.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        _disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._clock = clock
        self._lock = Lock()
        self._specs = {spec.name: spec for spec in METRICS}
        self._metrics = {spec.name: self._register(spec) for spec in METRICS}
        self._seen: dict[tuple[str, str], set[str]] = {}
        self._commits: deque[tuple[int, float]] = deque(maxlen=_HOUR_MINUTES)
        self.last_problem: Problem | None = None

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of docs/metrics.md."""
        metric = self._metrics[name]
        if not isinstance(metric, Counter):
            raise TypeError(f"{name} is a gauge")
        labelled = self._labelled(name, labels)
        (metric.labels(**labelled) if labelled else metric).inc(amount)
        if name == "microbatches_committed":
            self._count_commit(amount)
        elif name == "errors":
            self._remember_code(labelled["code"])

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of docs/metrics.md."""
        metric = self._metrics[name]
        if not isinstance(metric, Gauge):
            raise TypeError(f"{name} is a counter")
        labelled = self._labelled(name, labels)
        (metric.labels(**labelled) if labelled else metric).set(value)

    def event(self, name: str, **fields: object) -> None:
        """Log what happened; one with a ``code`` is a problem and is remembered as the last."""
        log_event(name, fields, is_problem="code" in fields)
        if "code" in fields:
            hint = fields.get("hint")
            self._remember(str(fields["code"]), _text_of(name, fields), str(hint) if hint else None)

    def problem(self, error: ShoalError) -> None:
        """Count, log and remember an error that the daemon survived."""
        self.count("errors", code=error.code)
        self.event("problem_occurred", code=error.code, cause=error.cause, hint=error.hint)

    def value(self, name: str, **labels: str) -> float:
        """Return a metric's value, summed over the labels that are not given; 0 if never set."""
        return sum(
            sample.value
            for family in self._metrics[name].collect()
            for sample in family.samples
            if all(sample.labels.get(label) == value for label, value in labels.items())
        )

    @property
    def committed_last_hour(self) -> int:
        """Microbatches committed in the last sixty minutes."""
        oldest = self._minute() - _HOUR_MINUTES
        with self._lock:
            return int(sum(amount for minute, amount in self._commits if minute > oldest))

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _register(self, spec: MetricSpec) -> Counter | Gauge:
        metric = Counter if spec.kind == "counter" else Gauge
        return metric(PREFIX + spec.name, spec.help, spec.labels, registry=self.registry)

    def _labelled(self, name: str, labels: dict[str, str]) -> dict[str, str]:
        if set(labels) != set(self._specs[name].labels):
            raise ValueError(f"{name} has labels {self._specs[name].labels}, not {tuple(labels)}")
        return {label: self._bounded(name, label, value) for label, value in labels.items()}

    def _bounded(self, name: str, label: str, value: str) -> str:
        """Return the value, or ``other`` if it is not a known or plain one, or one too many."""
        allowed = LABEL_VALUES.get(label)
        if allowed is not None:
            return value if value in allowed else OTHER
        with self._lock:
            seen = self._seen.setdefault((name, label), set())
            if value not in seen:
                if len(seen) >= MAX_LABEL_VALUES or not _PLAIN_VALUE.fullmatch(value):
                    return OTHER
                seen.add(value)
        return value

    def _count_commit(self, amount: float) -> None:
        minute = self._minute()
        with self._lock:
            if self._commits and self._commits[-1][0] == minute:
                amount += self._commits.pop()[1]
            self._commits.append((minute, amount))

    def _remember_code(self, code: str) -> None:
        """An error was counted: keep the text of the event about it, if there was one."""
        # Nothing that a person could look up, or the fault of a peer, which is no problem here.
        if code == OTHER or code in _PEERS_FAULTS:
            return
        last = self.last_problem
        if last is not None and last.code == code:
            self._remember(code, last.text, last.hint)
        else:
            self._remember(code, _MEANINGS[code])

    def _remember(self, code: str, text: str, hint: str | None = None) -> None:
        self.last_problem = Problem(code=code, text=text[:500], at=time.time(), hint=hint)

    def _minute(self) -> int:
        return int(self._clock() // 60)


def markdown_table() -> str:
    """Return the table of docs/metrics.md."""
    rows = [
        f"| `{spec.exposed}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels)} "
        f"| {spec.unit} | {spec.help} |"
        for spec in METRICS
    ]
    return "\n".join(["| name | kind | labels | unit | meaning |", "|---|---|---|---|---|", *rows])


def _text_of(name: str, fields: Fields) -> str:
    return str(fields.get("cause") or f"{name} {fields}")
