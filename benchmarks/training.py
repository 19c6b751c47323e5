"""Seconds per step under every routing policy, on ten regions, with and without churn.

    python benchmarks/training.py --write
    python benchmarks/training.py --seeds 8 --steps 5

All policies have the same network, memory, seeds and crashes (docs/training-simulator.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from training_arms import BESIDE_PAPER, CHANGED, SETTINGS, arm
from training_report import CHURNS, Cell, report

from protocol.simulation.training import POLICIES, FaultScript, Fleet, simulate

RESULTS = Path(__file__).parent / "results"


def run(cell: Cell, steps: int) -> dict[str, Any]:
    """Simulate a cell."""
    setting = SETTINGS[cell.setting]
    network = setting.network(cell.seed)
    policy, workload = arm(cell.policy, replace(setting.workload, steps=steps))
    script = FaultScript.draw(network.holders, steps, cell.churn, cell.seed)
    return simulate(Fleet(network, workload), policy, script, cell.seed).summary()


def cells(seeds: int) -> list[Cell]:
    """All runs."""
    arms = {name: tuple(POLICIES) for name in SETTINGS}
    arms["paper"] += BESIDE_PAPER
    main = [
        Cell(name, churn, seed, policy)
        for name in SETTINGS
        for churn in CHURNS
        for seed in range(seeds)
        for policy in arms[name]
    ]
    changed = [
        Cell("mixed", churn, seed, policy)
        for churn in CHURNS[1:]
        for seed in range(seeds)
        for policy in CHANGED
    ]
    return main + changed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite results/training.md")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    todo = cells(options.seeds)
    work = partial(run, steps=options.steps)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        results = dict(zip(todo, pool.map(work, todo), strict=True))
    text = report(results, options.steps)
    if options.write:
        (RESULTS / "training.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
