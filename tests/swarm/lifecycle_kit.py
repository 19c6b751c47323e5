"""Small swarms that train on and on, what can be done to their processes, and what they tell."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from harness import Plan
from reference.sample import sample_documents, write_documents

from node.local_swarm import Daemon, LocalSwarm
from node.status import NodeState
from protocol.errors import ResourceError

ENDLESS = 100_000
GONE_S = 5.0
# Two of the deadlines after which a silent peer counts as gone.
SILENCE_S = 12.0
PATIENCE_S = 60.0


class TrainingSwarm(LocalSwarm):
    """A swarm whose training does not end; ``observed`` daemons can be looked at from outside."""

    def step(self, name: str = "data-1") -> int:
        """The step that a node is in, -1 while it does not answer."""
        status = self[name].status()
        return -1 if status is None else status.step

    def await_steps(self, count: int, limit_s: float = PATIENCE_S) -> None:
        """Wait until that many more steps were made."""
        before = self.step()
        self.wait_until(lambda: self.step() >= before + count, f"{count} more steps", limit_s)

    def await_state(self, name: str, *states: NodeState, limit_s: float = PATIENCE_S) -> None:
        """Wait until a node says that it is in one of these states."""

        def is_there() -> bool:
            status = self[name].status()
            return status is not None and status.state in states

        self.wait_until(is_there, f"{name} to be {' or '.join(states)}", limit_s)

    def await_roster(self, stage: int, *names: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until a stage is held by just these nodes."""
        wanted = {self[name].peer_id for name in names}
        self.wait_until(lambda: self.roster(stage) == wanted, f"stage {stage}: {names}", limit_s)

    def roster(self, stage: int) -> set[str]:
        """Who holds a stage by the organiser's last decision."""
        lines = (self.organiser.state_dir / "decisions.jsonl").read_text().splitlines()
        return set(json.loads(lines[-1])["roster"][stage]) if lines else set()

    def end(self, name: str, number: int = signal.SIGTERM, limit_s: float = PATIENCE_S) -> float:
        """Send a signal and wait for the end; return how long it took."""
        daemon, began = self[name], time.monotonic()
        daemon.is_wanted = False
        daemon.send(number)
        self.wait_until(lambda: not daemon.is_running, f"{name} to end", limit_s)
        return time.monotonic() - began


@contextmanager
def training(
    root: Path, *, stages: int = 1, holders: int = 1, starts: bool = True, **options: object
) -> Iterator[TrainingSwarm]:
    """A swarm of one data node that has made its first steps; nothing of it may be left."""
    plan = Plan(steps=ENDLESS, stages=stages, holders=holders, data_nodes=1, quota=4)
    text = write_documents(root / "text", sample_documents())
    swarm = TrainingSwarm(root, plan.manifest, holders=holders, data=[text], **options)
    try:
        with swarm:
            if starts:
                swarm.start()
                swarm.wait_until(lambda: swarm.step() >= 2, "the first steps", 120)
            yield swarm
    except ResourceError:
        for daemon in swarm.daemons:
            print(f"--- {daemon.name}: {daemon.process.poll()}", *daemon.last_lines(), sep="\n")
        raise
    leftovers = swarm.leftovers()
    assert not leftovers, leftovers


# --- processes ---------------------------------------------------------------------------------


def children(daemon: Daemon) -> list[psutil.Process]:
    """The side-car and its p2pd."""
    with suppress(psutil.Error):
        return psutil.Process(daemon.pid).children(recursive=True)
    return []


def child(daemon: Daemon, name: str) -> psutil.Process:
    """The running ``sidecar`` or ``p2pd`` of a daemon."""
    return next(each for each in children(daemon) if (each.name() == "p2pd") == (name == "p2pd"))


def ports(daemon: Daemon) -> set[int]:
    """The TCP ports on which a daemon and its children listen."""
    found = set()
    for process in [psutil.Process(daemon.pid), *children(daemon)]:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.port)
    return found


def can_bind(port: int) -> bool:
    """Whether another program could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def await_gone(processes: Sequence[psutil.Process], limit_s: float = GONE_S) -> None:
    """Wait until none of these runs."""
    _, alive = psutil.wait_procs([p for p in processes if not is_zombie(p)], timeout=limit_s)
    assert [p for p in alive if not is_zombie(p)] == []


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# --- what a node tells -------------------------------------------------------------------------


def log_of(daemon: Daemon) -> list[dict[str, object]]:
    """The events that a daemon logged, of all its lives."""
    lines = (daemon.state_dir / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def counters(daemon: Daemon) -> Counter[str]:
    """The sums of a daemon's counters over their labels."""
    url = [event["url"] for event in log_of(daemon) if event["event"] == "metrics_served"][-1]
    with urllib.request.urlopen(str(url), timeout=10) as answer:
        text = answer.read().decode()
    sums: Counter[str] = Counter()
    for name, value in re.findall(r"(?m)^shoal_(\w+)_total(?:\{.*\})? (\S+)$", text):
        sums[name] += float(value)
    return sums


def eventually(condition: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    """Poll without a swarm's check of its daemons."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}"
        time.sleep(0.1)


__all__ = [
    "ENDLESS", "GONE_S", "PATIENCE_S", "SILENCE_S", "TrainingSwarm", "await_gone",
    "can_bind", "child", "children", "counters", "eventually", "log_of", "ports", "training",
]  # fmt: skip
