"""How good and how fast the flow router is, with real messages under delay and loss.

    python benchmarks/routing.py --write
    python benchmarks/routing.py --full --log /tmp/routing.jsonl --write
    python benchmarks/routing.py --tables cost --seeds 3

Tables: cost over the exact optimum by family of networks, beside other policies and over time;
what the paper's mean of bandwidths costs; ticks to the maximum flow after bursts; messages by the
size of the swarm. By default fewer seeds and no swarm above 1000; with --full, ten seeds (bursts: a
hundred), N=1001 on three, and N=5000. A log keeps each run: what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from routing_jobs import Job, run_job
from routing_report import report

RESULTS = Path(__file__).parent / "results"
TABLES = ("cost", "forms", "bursts", "messages")
COST_TICKS = {
    "N=33, cap 2-5, d 1-10": 300,
    "N=97, cap 1-5, d 20-100": 300,
    "N=97, cap 1-20, d 1-100": 300,
    "N=97, ten regions": 300,
    "N=97, twelve locations": 300,
    "N=100, 4 data nodes": 300,
}
LARGE, LARGE_TICKS, LARGE_SEEDS = "N=1001, cap 1-5, d 20-100", 400, 3
BURST_FAMILIES = ("N=33, cap 2-5, d 1-10", "N=97, cap 1-5, d 20-100")
BURST_TICK, BURST_TICKS = 60, 125
BURSTS = (0.05, 0.1, 0.2)
SIZES = {"N=33, cap 2-5, d 1-10": 80, "N=100": 80, "N=1000": 5, "N=5000": 2}
LARGEST = "N=5000"


def jobs(tables: Sequence[str], seeds: int, burst_seeds: int, *, is_full: bool) -> Iterator[Job]:
    """What is to be run."""
    if "messages" in tables:
        for family, ticks in SIZES.items():
            if is_full or family != LARGEST:
                yield Job("messages", family, 0, ticks)
    if "cost" in tables:
        if is_full:
            yield from (Job("cost", LARGE, seed, LARGE_TICKS) for seed in range(LARGE_SEEDS))
        for family, ticks in COST_TICKS.items():
            yield from (Job("cost", family, seed, ticks) for seed in range(seeds))
    if "forms" in tables:
        for is_arithmetic in (False, True):
            for seed in range(min(seeds, 5)):
                home = "N=97, ten regions, home links"
                yield Job("forms", home, seed, 200, is_arithmetic=is_arithmetic)
    if "bursts" in tables:
        for family, seed, burst in product(BURST_FAMILIES, range(burst_seeds), BURSTS):
            yield Job("bursts", family, seed, BURST_TICKS, burst, BURST_TICK)


def run_all(wanted: Sequence[Job], log: Path | None, processes: int) -> list[dict[str, Any]]:
    """Run what the log does not hold; return all results in the order of the jobs."""
    done = _read(log)
    missing = [job for job in wanted if job.key not in done]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run_job, job): job for job in missing}
        for number, future in enumerate(as_completed(futures), 1):
            job, result = futures[future], json.loads(json.dumps(future.result()))
            done[job.key] = result
            if log:
                with log.open("a") as file:
                    file.write(json.dumps({"key": job.key, "result": result}) + "\n")
            told = f"{result['flow']}/{result['optimal_flow']} {result['ratio']:.4f}"
            text = f"{number}/{len(missing)} {job.key}: {told}, {result['seconds']:.0f} s"
            print(text, file=sys.stderr, flush=True)
    return [done[job.key] for job in wanted]


def _read(log: Path | None) -> dict[str, dict[str, Any]]:
    if log is None or not log.exists():
        return {}
    entries = map(json.loads, log.read_text().splitlines())
    return {entry["key"]: entry["result"] for entry in entries}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="comma-separated")
    parser.add_argument("--seeds", type=int, help="of each family (5; --full: 10)")
    parser.add_argument("--burst-seeds", type=int, help="of each burst (20; --full: 100)")
    parser.add_argument("--full", action="store_true", help="hours instead of minutes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--log", type=Path, help="keep each run there, and run none twice")
    parser.add_argument("--report", action="store_true", help="run nothing: what the log holds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"the tables, to {RESULTS.name}/")
    options = parser.parse_args()
    seeds = options.seeds or (10 if options.full else 5)
    burst_seeds = options.burst_seeds or (100 if options.full else 20)
    tables = options.tables.split(",")
    wanted = list(jobs(tables, seeds, burst_seeds, is_full=options.full))
    if options.report:
        done = _read(options.log)
        results = [done[job.key] for job in wanted if job.key in done]
    else:
        results = run_all(wanted, options.log, options.processes)
    text = report(results)
    print(json.dumps(results) if options.json else text)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "routing.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
