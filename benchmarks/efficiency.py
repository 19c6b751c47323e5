"""How much of one computer's training speed a swarm on the same cores keeps.

    python benchmarks/efficiency.py --json
    python benchmarks/efficiency.py --wire bfloat16 --write

In every run, one after another: the plain loop with 1 and with 2 threads, two plain loops of one
thread at once (the ceiling: what the cores give to independent processes), and a swarm of one
data node and 3 stages x 2 holders. Reported are medians over the runs, as ratios to the better
plain loop. The swarm's clock is this process's, from one finished step to a later one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from efficiency_report import Contest, markdown, summary
from swarm_probe import ProbedSwarm, SwarmSample, difference

from cli.recipe import Recipe
from protocol.keys import PeerId
from protocol.manifest import Manifest

HOLDERS, CORES, WARM_UP_STEPS = 2, 2, 2
RESULTS = Path(__file__).parent / "results"


def plain_speed(width: int, threads: int, steps: int, processes: int = 1) -> float:
    """Tokens/s of so many plain loops together, which begin on the same signal."""
    command = [sys.executable, str(Path(__file__).with_name("plain_loop.py"))]
    command += ["--width", str(width), "--threads", str(threads), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with ExitStack() as stack:
        loops = [stack.enter_context(_piped(command, environment)) for _ in range(processes)]
        for loop in loops:
            if loop.stdout is None or loop.stdout.readline() != "ready\n":
                raise RuntimeError("a plain loop did not start")
        return sum(float(loop_output) for loop_output in _released(loops))


@contextmanager
def _piped(command: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child that ends with its use here, also when a person interrupts that."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def _released(loops: Sequence[subprocess.Popen[str]]) -> list[str]:
    for loop in loops:
        loop.stdin.write("go\n")
        loop.stdin.flush()
    return [loop.stdout.readline() for loop in loops]


def swarm_speed(width: int, wire: str, steps: int) -> SwarmSample:
    """Tokens/s of a swarm after its warm-up, and what its nodes spent meanwhile."""
    # A step more than is measured: at the end, nodes begin to write their weights.
    recipe = Recipe(width=width, wire_dtype=wire, holders=HOLDERS, steps=WARM_UP_STEPS + steps + 1)

    def without_validation(data_nodes: Sequence[PeerId]) -> Manifest:
        manifest = recipe.manifest(data_nodes)
        data = manifest.data.model_copy(update={"eval_every": 0})
        return manifest.model_copy(update={"data": data})

    with tempfile.TemporaryDirectory(prefix="shoal-efficiency-") as root:
        swarm = ProbedSwarm(Path(root), without_validation, holders=HOLDERS)
        with swarm:
            swarm.start()
            first = swarm.wait_for_step(WARM_UP_STEPS - 1)
            before, started = swarm.read(), time.perf_counter()
            last = swarm.wait_for_step(WARM_UP_STEPS - 1 + steps)
            seconds, after = time.perf_counter() - started, swarm.read()
        swarm.leftovers()
    tokens = (last - first) * recipe.quota * recipe.microbatch * recipe.context
    return SwarmSample(tokens / seconds, seconds, last - first, difference(before, after))


def measure(contest: Contest, wire: str, steps: int, plain_steps: int) -> None:
    """One run of all contestants."""
    width, speeds = contest.width, contest.speeds
    speeds["plain_1_thread"].append(plain_speed(width, 1, plain_steps))
    speeds["plain_2_threads"].append(plain_speed(width, 2, plain_steps))
    speeds["two_processes"].append(plain_speed(width, 1, plain_steps, processes=2))
    sample = swarm_speed(width, wire, steps)
    contest.swarms.append(sample)
    speeds["swarm"].append(sample.tokens_per_s)


def main() -> None:
    """Measure all widths, run by run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each swarm")
    parser.add_argument("--plain-steps", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--wire", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)  # children inherit it: everybody gets the same cores
    contests = [Contest(width) for width in options.widths]
    for run in range(options.runs):
        for contest in contests:
            measure(contest, options.wire, options.steps, options.plain_steps)
            latest = ", ".join(f"{n} {speeds[-1]:.0f}" for n, speeds in contest.speeds.items())
            print(f"run {run + 1}, width {contest.width}: {latest} tokens/s", file=sys.stderr)
    page = markdown(contests, options.wire, len(cores))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"efficiency-{options.wire}.md").write_text(page)
    print(json.dumps(summary(contests, options.wire, len(cores))) if options.json else page)


if __name__ == "__main__":
    main()
