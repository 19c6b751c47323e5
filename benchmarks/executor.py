"""What a stage's jobs cost: kept graphs beside recomputing, 1 and 2 threads, by width.

    python benchmarks/executor.py --write

One stage of the demo's model (2 of 6 layers, microbatch 8 x 128) in this process alone: forward,
backward and commit of some microbatches, then the sum and the optimiser's step into new buffers
with its digest. Modes take turns within a run; reported are medians over the runs, in wall time
and in processor time, which other work on the computer changes less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from cli.recipe import Recipe
from protocol.keys import NodeKey
from protocol.manifest import Manifest
from stages.block_stage import TorchBlockStage

RESULTS = Path(__file__).parent / "results"
PHASES = ("forward", "backward", "commit", "prepare")
STAGE, MICROBATCHES = 1, 4
MIB = 2**20


class Mode(NamedTuple):
    """One row of the table."""

    width: int
    threads: int
    recompute: bool

    @property
    def label(self) -> str:
        """What backward works from."""
        return "recompute" if self.recompute else "kept graph"


@dataclass
class Spent:
    """Milliseconds of each job in every run, wall and processor time, and memory kept."""

    wall_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    kept_mib: float = 0.0

    @contextmanager
    def timed(self, phase: str, count: int) -> Iterator[None]:
        """Time ``count`` jobs of a phase."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_ms[phase].append((time.perf_counter() - wall) * 1000 / count)
        self.cpu_ms[phase].append((time.process_time() - cpu) * 1000 / count)

    def medians(self, times: dict[str, list[float]]) -> dict[str, float]:
        """The median of each phase."""
        return {phase: round(statistics.median(times[phase]), 2) for phase in PHASES}


def manifest_of(width: int) -> Manifest:
    """The demo's model of that width."""
    return Recipe(width=width).manifest([NodeKey(bytes(32)).peer_id])


def run_once(mode: Mode, stage: TorchBlockStage, spent: Spent) -> None:
    """A step of ``MICROBATCHES`` at one stage."""
    torch.set_num_threads(mode.threads)
    manifest = manifest_of(mode.width)
    shape = (manifest.training.microbatch, manifest.model.context, mode.width)
    h_BTW, g_BTW = torch.randn(shape), torch.randn(shape) / 1000
    keys = range(MICROBATCHES)
    before = stage.bytes_kept
    _each(spent, "forward", lambda key: stage.forward(key, h_BTW, keep=True))
    spent.kept_mib = (stage.bytes_kept - before) / MICROBATCHES / MIB
    _each(spent, "backward", lambda key: stage.backward(key, g_BTW))
    _each(spent, "commit", lambda key: stage.commit(key, "data"))
    with spent.timed("prepare", 1):
        stage.prepare(stage.gradient(["data"]), len(keys))
    stage.apply()


def _each(spent: Spent, phase: str, job: Callable[[int], object]) -> None:
    with spent.timed(phase, MICROBATCHES):
        for key in range(MICROBATCHES):
            job(key)


def measure(widths: list[int], runs: int) -> dict[Mode, Spent]:
    """All modes of all widths in turns; the first run of each is not counted."""
    results: dict[Mode, Spent] = {}
    for width in widths:
        modes = [Mode(width, *rest) for rest in product((1, 2), (False, True))]
        stages = {
            mode: TorchBlockStage(manifest_of(width), STAGE, recompute=mode.recompute)
            for mode in modes
        }
        for mode in modes:
            run_once(mode, stages[mode], Spent())
            results[mode] = Spent()
        for _, mode in product(range(runs), modes):
            run_once(mode, stages[mode], results[mode])
        print(f"width {width}: done", file=sys.stderr)
    return results


def markdown(results: dict[Mode, Spent], runs: int) -> str:
    """The recorded page."""
    lines = [
        "# Executor",
        "",
        "Written by `python benchmarks/executor.py --write`. One stage of 2 layers, microbatch",
        f"8 x 128, fp32; milliseconds per job, medians of {runs} runs: wall time (processor time).",
        "Prepare holds the sum, the optimiser's step and the digest, once a step.",
        "",
        f"| width | threads | mode | {' | '.join(PHASES)} | kept per microbatch, MiB |",
        f"|{'---|' * (4 + len(PHASES))}",
    ]
    for mode, spent in results.items():
        wall, cpu = spent.medians(spent.wall_ms), spent.medians(spent.cpu_ms)
        cells = " | ".join(f"{wall[phase]:.1f} ({cpu[phase]:.1f})" for phase in PHASES)
        row = f"| {mode.width} | {mode.threads} | {mode.label} | {cells} | {spent.kept_mib:.1f} |"
        lines.append(row)
    return "\n".join([*lines, "", *_reading(results)]) + "\n"


def _reading(results: dict[Mode, Spent]) -> list[str]:
    """What the two choices cost, by width, in processor time of forward and backward."""
    lines = []
    for width in dict.fromkeys(mode.width for mode in results):
        kept, again = (_both_passes(results[Mode(width, 1, mode)]) for mode in (False, True))
        two = _both_passes(results[Mode(width, 2, False)])
        lines.append(
            f"- Width {width}: recomputing costs {again / kept:.2f} times the processor time of "
            f"kept graphs; two threads spend {two / kept:.2f} times that of one."
        )
    return lines


def _both_passes(spent: Spent) -> float:
    cpu = spent.medians(spent.cpu_ms)
    return cpu["forward"] + cpu["backward"]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    results = measure(options.widths, options.runs)
    page = markdown(results, options.runs)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "executor.md").write_text(page)
    rows = [
        {**mode._asdict(), "wall_ms": s.medians(s.wall_ms), "cpu_ms": s.medians(s.cpu_ms)}
        for mode, s in results.items()
    ]
    print(json.dumps(rows) if options.json else page)


if __name__ == "__main__":
    main()
