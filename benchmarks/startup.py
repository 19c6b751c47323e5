"""How long it takes until a node is of use: imports, side-car, joining up to the first commit.

    python benchmarks/startup.py --write

Imports are measured in fresh interpreters, in wall and in processor time. The side-car is started
by the daemon's own supervisor. Joining is that of a volunteer that comes to a local swarm which
trains already: from the start of its process to each stage of its way, seen from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from cli.recipe import Recipe
from node.local_swarm import Daemon, LocalSwarm
from node.sidecar.supervisor import Sidecar, SidecarOptions
from node.status import NodeStatus
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
IMPORTS = {
    "an empty interpreter": "pass",
    "the command line (`import cli.main`)": "import cli.main",
    "`shoal --version`": "import sys; sys.argv[1:] = ['--version']; from cli.main import app; "
    "app(standalone_mode=False)",
    "torch": "import torch",
    "py-libp2p": "import libp2p",
    "the daemon (`import node.daemon`)": "import node.daemon",
    "the side-car's child": "import node.sidecar.child.program",
}
WAY: dict[str, Callable[[NodeStatus], bool]] = {
    "answers on its socket": lambda status: True,
    "its side-car is up": lambda status: status.sidecar_up,
    "has a session": lambda status: status.peers > 0,
    "has a stage": lambda status: status.stage is not None,
    "is registered": lambda status: status.registered,
    "belongs to a step": lambda status: status.state == "training",
    "first commit": lambda status: status.committed_total > 0,
}
JOIN_LIMIT_S, POLL_S = 90.0, 0.02
RECIPE = Recipe(
    name="startup", layers=2, width=64, heads=2, context=64, stages=2, quota=8, microbatch=4,
    steps=10**6,
)  # fmt: skip
Samples = dict[str, list[float]]


class _Silent:
    """An Observer of nothing."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


def import_times(runs: int) -> tuple[Samples, Samples]:
    """Wall and processor seconds of fresh interpreters, in turns."""
    wall: Samples = defaultdict(list)
    cpu: Samples = defaultdict(list)
    for _ in range(runs):
        for name, code in IMPORTS.items():
            before, began = os.times(), time.perf_counter()
            command = [sys.executable, "-P", "-c", code]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            wall[name].append(time.perf_counter() - began)
            after = os.times()
            spent_s = after.children_user + after.children_system
            cpu[name].append(spent_s - before.children_user - before.children_system)
    return wall, cpu


async def sidecar_up_s() -> float:
    """Start a side-car; return how long it took to answer."""
    with tempfile.TemporaryDirectory(prefix="shoal-startup-") as folder:
        options = SidecarOptions(
            swarm="ab" * 32, listen=("/ip4/127.0.0.1/tcp/0",), bootstrap=(), maps_port=False,
            peer_cache=Path(folder) / "peers.json",
        )  # fmt: skip
        key = NodeKey(os.urandom(32))
        sidecar = Sidecar(key, options, Deadlines(), _Silent(), random.Random(0))
        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            await nursery.start(sidecar.run)
            passed_s = trio.current_time() - began
            nursery.cancel_scope.cancel()
    return passed_s


def join_times(runs: int) -> Samples:
    """Let volunteers join a training swarm one after another; seconds to each point of the way."""
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="shoal-startup-") as root:
        swarm = LocalSwarm(Path(root), _manifest, holders=1)
        with swarm:
            swarm.start()
            swarm.wait_until(lambda: swarm.organiser.steps() != [], "the first step")
            for run in range(runs):
                for point, seconds in join_once(swarm).items():
                    samples[point].append(seconds)
                print(f"join {run + 1}: {samples['first commit'][-1]:.1f} s", file=sys.stderr)
        swarm.leftovers()
    return samples


def _manifest(data_nodes: Sequence[PeerId]) -> Manifest:
    return RECIPE.manifest(data_nodes)


def join_once(swarm: LocalSwarm) -> dict[str, float]:
    """Follow one joiner to its first commit, and have it leave again."""
    began = time.monotonic()
    joiner = swarm.spawn("volunteer", 1)
    passed: dict[str, float] = {}
    while len(passed) < len(WAY):
        swarm.check()
        now = time.monotonic() - began
        if now > JOIN_LIMIT_S:
            missing = ", ".join(WAY.keys() - passed.keys())
            raise TimeoutError(f"a joiner did not get there in {JOIN_LIMIT_S:.0f} s: {missing}")
        if (status := joiner.status()) is not None:
            passed |= {p: now for p, holds in WAY.items() if p not in passed and holds(status)}
        time.sleep(POLL_S)
    _dismiss(swarm, joiner)
    return passed


def _dismiss(swarm: LocalSwarm, joiner: Daemon) -> None:
    joiner.is_wanted = False
    joiner.client.leave()
    swarm.wait_until(lambda: not joiner.is_running, "the joiner to leave", JOIN_LIMIT_S)


def markdown(wall: Samples, cpu: Samples, sidecar: list[float], join: Samples) -> str:
    """The recorded page."""
    median = statistics.median
    lines = [
        "# Startup",
        "",
        "Written by `python benchmarks/startup.py --write`. Seconds, medians.",
        "",
        "| interpreter with | runs | wall | processor |",
        f"|{'---|' * 4}",
        *(
            f"| {name} | {len(times)} | {median(times):.2f} | {median(cpu[name]):.2f} |"
            for name, times in wall.items()
        ),
        "",
        f"A side-car is up after {median(sidecar):.2f} s ({len(sidecar)} starts).",
        "",
        "A volunteer that joins a training swarm, from the start of its process:",
        "",
        "| point | runs | median | slowest |",
        f"|{'---|' * 4}",
        *(
            f"| {point} | {len(join[point])} | {median(join[point]):.2f} | {max(join[point]):.2f} |"
            for point in sorted(join, key=lambda point: median(join[point]))
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    wall, cpu = import_times(options.runs)
    sidecar = [trio.run(sidecar_up_s) for _ in range(options.runs)]
    join = join_times(options.runs)
    page = markdown(wall, cpu, sidecar, join)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "startup.md").write_text(page)
    told = {"import_wall_s": wall, "import_cpu_s": cpu, "sidecar_s": sidecar, "join_s": join}
    print(json.dumps(told) if options.json else page)


if __name__ == "__main__":
    main()
