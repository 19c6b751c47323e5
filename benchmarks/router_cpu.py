"""What the flow router costs in a real swarm of eight nodes: its share of their processor time.

    python benchmarks/router_cpu.py --write

Routing is measured on the event loop's thread, around every message and tick of the router; the
sending of its messages is not in it. Two data nodes, three stages with two holders each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from swarm_probe import ProbedSwarm, Reading, difference

from cli.recipe import Recipe

RESULTS = Path(__file__).parent / "results"
WARM_UP_STEPS = 3
TARGET = 0.01


def measure(width: int, steps: int) -> dict[int, Reading]:
    """What each stage's nodes spent on ``steps`` steps, summed over its holders."""
    recipe = Recipe(width=width, data_nodes=2, holders=2, steps=WARM_UP_STEPS + steps + 1)
    with tempfile.TemporaryDirectory(prefix="shoal-router-") as root:
        swarm = ProbedSwarm(Path(root), recipe.manifest, data_nodes=2, holders=2)
        with swarm:
            swarm.start()
            swarm.wait_for_step(WARM_UP_STEPS - 1)
            before = swarm.read()
            swarm.wait_for_step(WARM_UP_STEPS - 1 + steps)
            after = swarm.read()
        swarm.leftovers()
    return difference(before, after)


def share(reading: Reading) -> float:
    """Routing's part of the processor time, side-cars included."""
    return reading["routing"] / (reading["cpu daemon"] + reading["cpu side-car"])


def report(runs: dict[int, dict[int, Reading]], steps: int) -> str:
    """The page."""
    lines = [
        "# The router's processor time",
        "",
        f"Written by `python benchmarks/router_cpu.py --write`. Eight nodes, {steps} steps after "
        f"{WARM_UP_STEPS}; processor seconds",
        "of all nodes of a stage (0: data nodes), side-cars included, and the flow router's part.",
        "",
        "| width | stage | processor s | routing s | share |",
        "|---|---|---|---|---|",
    ]
    for width, spent in runs.items():
        whole: Reading = {}
        for stage, reading in sorted(spent.items()):
            lines.append(f"| {width} | {stage} | {_cells(reading)} |")
            whole = {k: whole.get(k, 0.0) + v for k, v in reading.items()}
        verdict = "met" if share(whole) < TARGET else "not met"
        lines.append(f"| {width} | all | {_cells(whole)} (under 1 %: {verdict}) |")
    return "\n".join([*lines, ""])


def _cells(reading: Reading) -> str:
    busy_s = reading["cpu daemon"] + reading["cpu side-car"]
    return f"{busy_s:.1f} | {reading['routing']:.3f} | {100 * share(reading):.2f} %"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="record the table in results/")
    options = parser.parse_args()
    runs = {width: measure(width, options.steps) for width in options.widths}
    text = report(runs, options.steps)
    if options.write:
        (RESULTS / "router_cpu.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
