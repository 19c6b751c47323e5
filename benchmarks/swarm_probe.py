"""A local swarm whose /metrics and processor times can be read between two steps."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from node.local_swarm import Daemon, LocalSwarm

STEP_LIMIT_S = 600.0
Reading = dict[str, float]


@dataclass(frozen=True)
class SwarmSample:
    """One measured swarm: speed, wall time, and what each stage's nodes spent of it.

    ``spent`` maps a stage to seconds and bytes by name, summed over its holders.
    """

    tokens_per_s: float
    seconds: float
    steps: int
    spent: dict[int, Reading]


class ProbedSwarm(LocalSwarm):
    """Gives every daemon a known port for its metrics."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ports: dict[str, int] = {}

    def spawn(
        self,
        role: Any,
        stage: int | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Daemon:
        """Start a daemon with a metrics port of its own."""
        port = _free_port()
        daemon = super().spawn(
            role, stage, env={**(env or {}), "SHOAL_METRICS_PORT": str(port)}, name=name
        )
        self._ports[daemon.name] = port
        return daemon

    def wait_for_step(self, step: int) -> int:
        """Wait until ``step`` is finished; return the last finished step."""
        last = -1

        def is_done() -> bool:
            nonlocal last
            fresh = self.organiser.client.steps(last)
            last = fresh[-1].step if fresh else last
            return last >= step

        self.wait_until(is_done, f"step {step}", STEP_LIMIT_S)
        return last

    def read(self) -> dict[int, Reading]:
        """What every stage's nodes spent since their start, summed over its holders."""
        totals: dict[int, Reading] = defaultdict(lambda: defaultdict(float))
        for daemon in self.daemons:
            of_stage = totals[daemon.stage or 0]
            for name, value in {**self._metrics(daemon), **_processor_times(daemon.pid)}.items():
                of_stage[name] += value
        return totals

    def _metrics(self, daemon: Daemon) -> Reading:
        text = httpx.get(f"http://127.0.0.1:{self._ports[daemon.name]}/metrics", timeout=10).text
        reading: Reading = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "shoal_seconds_total":
                    reading[sample.labels["phase"]] = sample.value
                elif sample.name == "shoal_bytes_total":
                    key = f"bytes {sample.labels['direction']} {sample.labels['kind']}"
                    reading[key] = sample.value
        return reading


def difference(before: dict[int, Reading], after: dict[int, Reading]) -> dict[int, Reading]:
    """What was spent between two readings."""
    return {
        stage: {name: value - before[stage].get(name, 0.0) for name, value in reading.items()}
        for stage, reading in after.items()
    }


def _processor_times(pid: int) -> Reading:
    """Processor seconds of a daemon and of its side-car with all below it."""
    process = psutil.Process(pid)
    below = 0.0
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            below += _busy(child)
    return {"cpu daemon": _busy(process), "cpu side-car": below}


def _busy(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
