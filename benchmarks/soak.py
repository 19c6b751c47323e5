"""Whether a swarm that runs on and on keeps its memory, files, threads and logs.

    python benchmarks/soak.py --minutes 30 --write

Runs a small swarm (1 data node, 2 stages x 2 holders, all at nice 10), looks at every process and
log file of every node, and fits slopes (Theil-Sen: the median over all pairs of samples, which a
single spike does not move) to what was seen after a warm-up of a quarter of the time. The slopes
do not depend on how fast the computer is; a run of some minutes shows a leak by the step already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from node_processes import look_at
from soak_report import Sample, Soak

from cli.recipe import Recipe
from node.local_swarm import DaemonDiedError, LocalSwarm
from protocol.keys import PeerId
from protocol.manifest import Manifest

RESULTS = Path(__file__).parent / "results"
LOGS = ("log.jsonl", "output.log", "steps.jsonl", "decisions.jsonl")
NICENESS = 10
RECIPE = Recipe(
    name="soak", layers=2, width=64, heads=2, context=64, stages=2, holders=2, quota=8,
    microbatch=4, steps=10**6, learning_rate=1e-3,
)  # fmt: skip
EVAL_EVERY = 50


def soak(minutes: float, pause_s: float) -> Soak:
    """Run the swarm for so long; return what was seen."""
    os.nice(NICENESS)  # children inherit it
    result = Soak(minutes)
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as root:
        swarm = LocalSwarm(Path(root), _manifest, holders=RECIPE.holders)
        with swarm:
            try:
                swarm.start()
                swarm.wait_until(lambda: swarm.organiser.steps() != [], "the first step")
                for passed_s in ticks(minutes * 60, pause_s):
                    swarm.check()
                    result.samples.append(take_sample(swarm, passed_s))
                    print(result.progress(), file=sys.stderr)
            except DaemonDiedError as error:
                print("\n".join(error.daemon.last_lines()), file=sys.stderr)
                raise
        if left := swarm.leftovers():
            raise RuntimeError(f"processes were left behind: {left}")
    return result


def ticks(duration_s: float, pause_s: float) -> Iterator[float]:
    """Yield the seconds passed, with pauses between."""
    began = time.monotonic()
    while (passed_s := time.monotonic() - began) < duration_s:
        yield passed_s
        time.sleep(pause_s)


def _manifest(data_nodes: Sequence[PeerId]) -> Manifest:
    manifest = RECIPE.manifest(data_nodes)
    data = manifest.data.model_copy(update={"eval_every": EVAL_EVERY})
    return manifest.model_copy(update={"data": data})


def take_sample(swarm: LocalSwarm, passed_s: float) -> Sample:
    """Look at all nodes once."""
    status = swarm.organiser.status()
    sample = Sample(passed_s, status.step if status else 0)
    for daemon in swarm.daemons:
        for kind, held in look_at(daemon.pid).items():
            key = f"{daemon.name} {kind}"
            sample.processes[key] = held
        for log in LOGS:
            sizes = [path.stat().st_size for path in daemon.state_dir.glob(f"{log}*")]
            sample.logs[f"{daemon.name} {log}"] = sum(sizes)
    return sample


def main() -> None:
    """Soak and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=10, metavar="SECONDS")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    result = soak(options.minutes, options.every)
    page = result.markdown()
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "soak.md").write_text(page)
    print(json.dumps(result.summary()) if options.json else page)


if __name__ == "__main__":
    main()
