"""How long a swarm stands still when the last holder of a stage dies, with CheckFree.

    python benchmarks/rebuilding.py --write

A local swarm of five stages with one holder each. One with its state is killed (SIGKILL); measured
is the time until a microbatch counts that went through the rebuilt stage. Once another volunteer
serves some other stage then, and changes over; once a new one is started, in the same moment.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cli.recipe import Recipe
from node.local_swarm import Daemon, LocalSwarm
from node.status import NodeStatus
from protocol.deadlines import Deadlines
from protocol.keys import PeerId
from protocol.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
LIMIT_S, POLL_S = 180.0, 0.02
INTERIOR = (3, 2, 4)
RECIPE = Recipe(
    name="rebuilding", layers=5, width=64, heads=2, context=64, stages=5, quota=8, microbatch=4,
    steps=10**6, recovery="checkfree",
)  # fmt: skip
Seconds = dict[str, float]


def _manifest(data_nodes: Sequence[PeerId]) -> Manifest:
    return RECIPE.manifest(data_nodes)


def one_run(*, has_spare: bool) -> Seconds:
    """Kill one holder; return the seconds to the stage's new state and to the first commit."""
    with tempfile.TemporaryDirectory(prefix="shoal-rebuilding-") as root:
        with LocalSwarm(Path(root), _manifest, holders=1) as swarm:
            swarm.start()
            swarm.wait_until(lambda: len(swarm.organiser.steps()) >= 2, "two steps", LIMIT_S)
            spare = _running_spare(swarm) if has_spare else None
            lost = next(k for k in INTERIOR if spare is None or spare.status().stage != k)
            began = time.monotonic()
            swarm.kill(f"stage-{lost}-a")
            seconds = _heal(swarm, spare or swarm.spawn("volunteer"), lost, began)
        swarm.leftovers()
    return seconds


def _running_spare(swarm: LocalSwarm) -> Daemon:
    spare = swarm.spawn("volunteer")
    _when(swarm, spare, lambda status: status.state == "training" and status.committed_total > 0)
    return spare


def _heal(swarm: LocalSwarm, healer: Daemon, lost: int, began: float) -> Seconds:
    def serves(status: NodeStatus) -> bool:
        return status.stage == lost and status.state == "training"

    before = _when(swarm, healer, serves).committed_total
    rebuilt_s = time.monotonic() - began
    _when(swarm, healer, lambda status: serves(status) and status.committed_total > before)
    return {"rebuilt": rebuilt_s, "first commit": time.monotonic() - began}


def _when(swarm: LocalSwarm, daemon: Daemon, holds: Callable[[NodeStatus], bool]) -> NodeStatus:
    """Poll a node's status until ``holds``; return that status, or raise TimeoutError."""
    end = time.monotonic() + LIMIT_S
    while (status := daemon.status()) is None or not holds(status):
        swarm.check()
        if time.monotonic() > end:
            raise TimeoutError(f"{daemon.name} did not get there in {LIMIT_S:.0f} s: {status}")
        time.sleep(POLL_S)
    return status


def markdown(runs: dict[str, list[Seconds]]) -> str:
    """The recorded page."""
    lines = [
        "# Rebuilding a stage",
        "",
        "Written by `python benchmarks/rebuilding.py --write`. Five stages with one holder each on",
        "one computer; one is killed. Seconds from its death; the swarm waits "
        f"{Deadlines().rebuild_wait_s:.0f} s of them for it to come",
        "back. A new volunteer has to start first, see [startup](startup.md).",
        "",
        "| who rebuilds | runs | at work at the stage, median | first commit, median | slowest |",
        f"|{'---|' * 5}",
    ]
    for name, samples in runs.items():
        rebuilt, commit = ([s[key] for s in samples] for key in ("rebuilt", "first commit"))
        lines.append(
            f"| {name} | {len(samples)} | {statistics.median(rebuilt):.1f} | "
            f"{statistics.median(commit):.1f} | {max(commit):.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the table in results/")
    options = parser.parse_args()
    kinds = {"a holder of another stage": True, "a volunteer started at the death": False}
    runs: dict[str, list[Seconds]] = {name: [] for name in kinds}
    for run in range(options.runs):
        for name, has_spare in kinds.items():
            runs[name].append(one_run(has_spare=has_spare))
            print(f"run {run + 1}, {name}: {runs[name][-1]}", file=sys.stderr)
    page = markdown(runs)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "rebuilding.md").write_text(page)
    print(json.dumps(runs) if options.json else page)


if __name__ == "__main__":
    main()
