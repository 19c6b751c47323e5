"""What a node costs its owner while it has nothing to do: memory by process, processor time.

    python benchmarks/idle.py --write

Two situations: an organiser alone, and a swarm that waits because one stage lacks a holder. Memory
is given as RSS (with what is shared), PSS (shares divided) and USS (its own alone); processor time
as a share of one core and wake-ups as context switches a second, which do not depend on other
work on the computer as times do.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from node_processes import Held, held_by, processes_of

from cli.recipe import Recipe
from node.local_swarm import LocalSwarm
from protocol.keys import PeerId
from protocol.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
SETTLE_S = 15.0
# Two holders for each of two stages are wanted; the situations start fewer.
RECIPE = Recipe(name="idle", layers=2, stages=2, holders=2)
SITUATIONS = {"alone": 0, "waiting": 1}  # holders of each stage that are started


@dataclass(frozen=True)
class Reading:
    """One process over the measured time."""

    situation: str
    node: str
    kind: str
    held: Held
    cpu_share: float
    switches_per_s: float

    def row(self) -> str:
        """Its row of the table."""
        held = self.held
        return (
            f"| {self.situation} | {self.node} | {self.kind} | {held.rss_mib:.0f} "
            f"| {held.pss_mib:.0f} | {held.uss_mib:.0f} | {held.files} | {held.threads} "
            f"| {self.cpu_share:.2%} | {self.switches_per_s:.0f} |"
        )


def measure(situation: str, seconds: float) -> list[Reading]:
    """Start the nodes of a situation, let them settle, and watch them."""
    with tempfile.TemporaryDirectory(prefix="shoal-idle-") as root:
        swarm = LocalSwarm(Path(root), _manifest, holders=SITUATIONS[situation])
        with swarm:
            swarm.start()
            time.sleep(SETTLE_S)
            found = watch(swarm, situation, seconds)
        swarm.leftovers()
    return found


def _manifest(data_nodes: Sequence[PeerId]) -> Manifest:
    return RECIPE.manifest(data_nodes)


def watch(swarm: LocalSwarm, situation: str, seconds: float) -> list[Reading]:
    """Read every process twice, so long apart."""
    processes = [
        (daemon.name, kind, process)
        for daemon in swarm.daemons
        for kind, process in processes_of(daemon.pid)
    ]
    before = [(held_by(process).cpu_s, _switches(process)) for *_, process in processes]
    began = time.monotonic()
    time.sleep(seconds)
    found = []
    for (node, kind, process), (cpu_s, switches) in zip(processes, before, strict=True):
        with suppress(psutil.NoSuchProcess):  # a side-car may have been replaced
            passed_s = time.monotonic() - began
            held = held_by(process)
            share, rate = (held.cpu_s - cpu_s) / passed_s, (_switches(process) - switches)
            found.append(Reading(situation, node, kind, held, share, rate / passed_s))
    return found


def _switches(process: psutil.Process) -> int:
    """Of all threads: psutil tells those of the first alone."""
    total = 0
    for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
        with suppress(OSError):
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            total += int(fields["voluntary_ctxt_switches"])
    return total


def markdown(readings: Sequence[Reading], seconds: float) -> str:
    """The recorded page."""
    lines = [
        "# Idle nodes",
        "",
        f"Written by `python benchmarks/idle.py --write`. Watched for {seconds:g} s after",
        f"{SETTLE_S:g} s of rest. *alone*: an organiser without volunteers. *waiting*: a swarm of",
        "two stages, each with one holder where the manifest wants two. Memory in MiB.",
        "",
        "| situation | node | process | RSS | PSS | USS | files | threads "
        "| of a core | wake-ups/s |",
        f"|{'---|' * 10}",
        *(reading.row() for reading in readings),
        "",
        "| situation | node | PSS | USS | of a core |",
        f"|{'---|' * 5}",
        *_sums(readings),
    ]
    return "\n".join(lines) + "\n"


def _sums(readings: Sequence[Reading]) -> list[str]:
    rows = []
    for situation, node in dict.fromkeys((r.situation, r.node) for r in readings):
        ours = [r for r in readings if (r.situation, r.node) == (situation, node)]

        def total(read: Callable[[Reading], float], parts: Sequence[Reading] = ours) -> float:
            return sum(map(read, parts))

        rows.append(
            f"| {situation} | {node} | {total(lambda r: r.held.pss_mib):.0f} "
            f"| {total(lambda r: r.held.uss_mib):.0f} | {total(lambda r: r.cpu_share):.2%} |"
        )
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    readings = [r for situation in SITUATIONS for r in measure(situation, options.seconds)]
    page = markdown(readings, options.seconds)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "idle.md").write_text(page)
    rows = [
        {"situation": r.situation, "node": r.node, "process": r.kind, "uss_mib": r.held.uss_mib,
         "pss_mib": r.held.pss_mib, "rss_mib": r.held.rss_mib, "cpu_share": r.cpu_share,
         "wake_ups_per_s": r.switches_per_s}
        for r in readings
    ]  # fmt: skip
    print(json.dumps(rows) if options.json else page)


if __name__ == "__main__":
    main()
