"""The page of ``benchmarks/recovery.py``: tables and what follows from them, computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from recovery_baselines import (
    ITERATION_S,
    REBUILD_S,
    WRITE_S,
    Course,
    at,
    measured,
    measured_redundancy,
    redundant,
    with_checkpoints,
    youngs_interval,
)
from recovery_baselines import PAPERS_REDUNDANCY as PAPERS
from recovery_runs import (
    ALSO,
    ARMS,
    BEFORE_STEPS,
    ESSENTIAL,
    FAILURE_RATE,
    Arm,
    failures,
)
from recovery_swarm import CONTEXT, QUOTA, ROWS, STAGES, WIDTH

Record = dict[str, Any]
LEAST_COST = 0.3  # nats that a deleted stage must cost, or arms cannot differ
OF_INTERIOR = "interior"
INITIALISERS = ("CheckFree sq", "CheckFree l2", "uniform", "copy", "random")


@dataclass(frozen=True)
class Line:
    """One way to live with failures, as it went in each seed."""

    name: str
    courses: dict[int, Course]
    records: dict[int, Record]  # empty where no run was needed
    offsets: dict[int, float]  # loss on the large held-out set less that of the curve's end

    def above(self, none: Line, place: Callable[[Line, int], float]) -> dict[int, float]:
        """By how much its loss is above that of no failures, by seed."""
        seeds = self.courses.keys() & none.courses.keys()
        return {seed: place(self, seed) - place(none, seed) for seed in sorted(seeds)}


def by_iteration(line: Line, seed: int, steps: int) -> float:
    """The loss after all iterations, on the large held-out set."""
    return at(line.courses[seed].by_iteration, steps) + line.offsets[seed]


def by_time(line: Line, seed: int, steps: int) -> float:
    """The loss at the time at which training without failures has done all iterations."""
    return at(line.courses[seed].by_second, steps * ITERATION_S)


def run_lines(records: Sequence[Record], arms: Sequence[Arm]) -> list[Line]:
    """One line per arm that was run."""
    lines = []
    for arm in arms:
        mine = {r["seed"]: r for r in records if r["arm"] == arm.name}
        if mine:
            courses = {seed: measured(r) for seed, r in mine.items()}
            lines.append(Line(arm.name, courses, mine, _offsets(mine)))
    return lines


def _offsets(records: dict[int, Record]) -> dict[int, float]:
    return {seed: r["final"] - r["curve"][-1][1] for seed, r in records.items()}


def read_lines(records: Sequence[Record], which: str, steps: int) -> list[Line]:
    """Checkpoints and redundant computing under one schedule of failures."""
    nones = {r["seed"]: r for r in records if r["arm"] == "none"}
    lost = {seed: failures(seed, steps, which) for seed in nones}
    young = youngs_interval(FAILURE_RATE * (STAGES if which == "all" else STAGES - 2))
    offsets = _offsets(nones)
    lines = [
        Line(name, {s: with_checkpoints(r, lost[s], k) for s, r in nones.items()}, {}, offsets)
        for name, k in (
            ("checkpoint every 10", 10), ("checkpoint every 100", 100),
            (f"checkpoint every {young} (Young)", young),
        )
    ]  # fmt: skip
    for whose, cost in (("here", measured_redundancy(list(nones.values()))), ("paper", PAPERS)):
        name = f"redundant computing, x {cost:.2f} ({whose})"
        lines.append(Line(name, {s: redundant(r, cost) for s, r in nones.items()}, {}, offsets))
    return lines


def report(records: Sequence[Record], steps: int) -> str:
    """The page."""
    records = [r for r in records if r["steps"] == steps]
    lines = {line.name: line for line in run_lines(records, ARMS)}
    none = lines["none"]
    arms = {which: [a for a in ARMS if a.failures == which] for which in ("interior", "all")}
    parts = [*_head(records, steps), *_deletion(none)]
    verdicts = _deletion_verdict(none)
    for which, title in (("interior", "Stages 2 to 5 are lost"), ("all", "The ends are lost too")):
        played = [none] + [lines[a.name] for a in arms[which] if a.name in lines]
        if which == "all" and "CheckFree+ without failures" in lines:
            played.insert(1, lines["CheckFree+ without failures"])
        read = read_lines(records, which, steps)
        parts += ["", f"## {title}", "", *_table(played + read, none, steps)]
        verdicts += _against(played, read, none, steps, which)
    verdicts += _initialisers(lines, none, steps) + _plus(lines, none, steps)
    return "\n".join([*parts, "", "## What follows", "", *verdicts, ""])


def _head(records: Sequence[Record], steps: int) -> list[str]:
    seeds = {arm.name: sum(r["arm"] == arm.name for r in records) for arm in ESSENTIAL + ALSO}
    most = max(seeds.values())
    fewer = ", ".join(f"{name} {n}" for name, n in seeds.items() if 0 < n < most)
    missing = ", ".join(name for name, n in seeds.items() if not n)
    return [
        "# Recovery",
        "",
        "Written by `python benchmarks/recovery.py --write`. A LLaMA of "
        f"{STAGES} stages with one layer each, width {WIDTH}, context",
        f"{CONTEXT}, bytes of a made-up language; {QUOTA} microbatches of {ROWS} sequences per "
        f"step; {BEFORE_STEPS} steps in common, then {steps} with",
        f"losses of a stage's only holder, {FAILURE_RATE:.1%} per stage and step, the same for "
        "all arms of a seed, one at a time. Loss is in nats",
        f"per byte, held out. Seeds: {most}"
        + (f"; fewer for {fewer}" if fewer else "")
        + (f"; not run: {missing}" if missing else "")
        + ".",
        "",
        f"Time is simulated with the paper's {ITERATION_S} s per iteration and {REBUILD_S:g} s to "
        f"rebuild a stage; writing a checkpoint",
        f"is assumed to stop training for {WRITE_S:g} s. *At equal time* is when training without "
        f"failures has done {steps} iterations.",
        "Ranges are over the seeds.",
    ]


def _deletion(none: Line) -> list[str]:
    lines = [
        "",
        "## What a stage is worth",
        "",
        "Rise of the loss when a stage is passed by, in nats: before the first failure and at the "
        "end of training without any.",
        "",
        "| seed | when |" + "".join(f" {k} |" for k in range(1, STAGES + 1)),
        "|" + "---|" * (STAGES + 2),
    ]
    for seed, record in sorted(none.records.items()):
        for when, costs in zip(("before", "end"), record["deletion"], strict=True):
            lines.append(f"| {seed} | {when} |" + "".join(f" {c:.2f} |" for c in costs))
    return lines


def _deletion_verdict(none: Line) -> list[str]:
    made = []
    for name, stages in (
        ("Stages 2 to 5", slice(1, -1)),
        ("The ends", slice(None, None, STAGES - 1)),
    ):
        before, end = (
            min(cost for r in none.records.values() for cost in r["deletion"][when][stages])
            for when in (0, 1)
        )
        made.append(
            f"- {name} must each cost at least {LEAST_COST} nats when passed by, or the arms "
            f"cannot differ: the least is {before:.3f} before the first failure, {end:.3f} at "
            f"the end{'' if min(before, end) >= LEAST_COST else ' (NOT enough everywhere)'}."
        )
    moves = [
        abs(later[1] - earlier[1])
        for record in none.records.values()
        for earlier, later in pairwise(record["curve"][-9:])
    ]
    made.append(
        f"- Without failures the loss moves by {statistics.mean(moves):.3f} nats (mean) between "
        "evaluations near the end: smaller differences are noise."
    )
    return made


def _table(lines: Sequence[Line], none: Line, steps: int) -> list[str]:
    made = [
        "| arm | losses of a stage | loss after all iterations | above none | above none, at "
        "equal time | jump | steps to regain | regained |",
        "|" + "---|" * 8,
    ]
    for line in lines:
        finals = [by_iteration(line, seed, steps) for seed in line.courses]
        above = line.above(none, partial(by_iteration, steps=steps))
        late = line.above(none, partial(by_time, steps=steps))
        made.append(
            f"| {line.name} | {_losses(line)} | {_range(finals, '.3f')} "
            f"| {_range(above.values(), '+.3f')} | {_range(late.values(), '+.3f')} "
            f"| {_jumps(line)} |"
        )
    return made


def _losses(line: Line) -> str:
    counts = [len(record["jumps"]) for record in line.records.values()]
    return f"{statistics.mean(counts):.0f}" if counts else "-"


def _jumps(line: Line) -> str:
    """Mean rise of the loss, median steps until it is as low as before, and how often it got so."""
    jumps = [jump for record in line.records.values() for jump in record["jumps"]]
    if not jumps:
        return "- | - | -"
    rise = statistics.mean(jump["after"] - jump["before"] for jump in jumps)
    steps = [math.inf if j["regained"] is None else j["regained"] for j in jumps]
    middle = statistics.median(steps)
    shown = f"{middle:.0f}" if middle < math.inf else "more"
    return f"{rise:+.3f} | {shown} | {statistics.mean(s < math.inf for s in steps):.0%}"


def _range(values: Any, form: str) -> str:
    """Mean, and the range if there is more than one value."""
    values = list(values)
    mean = format(statistics.mean(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def compare(a: dict[int, float], b: dict[int, float]) -> str:
    """Whether ``a`` is lower than ``b``: by their ranges over the seeds that both have.

    One seed shows nothing.
    """
    seeds = a.keys() & b.keys()
    mine, others = [a[seed] for seed in seeds], [b[seed] for seed in seeds]
    if len(seeds) > 1 and max(mine) < min(others):
        return "lower"
    if len(seeds) > 1 and min(mine) > max(others):
        return "higher"
    return "no difference"


def _initialisers(lines: dict[str, Line], none: Line, steps: int) -> list[str]:
    """Every pair of ways to fill an interior stage."""
    place = partial(by_iteration, steps=steps)
    above = {n: lines[n].above(none, place) for n in INITIALISERS if n in lines}
    seeds = sorted(set.intersection(*(set(values) for values in above.values())))
    means = {name: statistics.mean(values[s] for s in seeds) for name, values in above.items()}
    ranked = sorted(means, key=lambda name: means[name])
    made = [
        f"- Interior stages, from the lowest loss ({len(seeds)} seeds that all of these have): "
        + ", ".join(f"{name} {means[name]:+.3f}" for name in ranked)
        + ". The paper's order is gradient-weighted, average, copy, random."
    ]
    shown = [
        f"{a} under {b}"
        for i, a in enumerate(ranked)
        for b in ranked[i + 1 :]
        if compare(above[a], above[b]) == "lower"
    ]
    made.append(
        f"- Ranges that do not overlap: {'; '.join(shown) or 'none'}. All other pairs of these "
        "show no difference."
    )
    bare = lines.get("CheckFree sq, rate x 1.0")
    if bare is not None and "CheckFree sq" in above:
        found = compare(above["CheckFree sq"], bare.above(none, place))
        made.append(f"- The learning rate x 1.1 against x 1.0, both with sq: {found}.")
    return made


def _plus(lines: dict[str, Line], none: Line, steps: int) -> list[str]:
    place = partial(by_iteration, steps=steps)
    made = []
    quiet = lines.get("CheckFree+ without failures")
    if quiet is not None:
        cost = quiet.above(none, place)
        made.append(
            f"- Swapping alone, without a failure, costs {_range(cost.values(), '+.3f')} nats"
            f" ({compare(cost, dict.fromkeys(cost, 0.0))})."
        )
    plus, naive = lines.get("CheckFree+"), lines.get("naive copy of the ends")
    if plus is not None and naive is not None:
        made.append(
            f"- CheckFree+ against copying an end's neighbour without swapping: loss "
            f"{compare(plus.above(none, place), naive.above(none, place))}; mean jump when an end "
            f"is lost {_end_jump(plus)} against {_end_jump(naive)}."
        )
    return made


def _end_jump(line: Line) -> str:
    ends = [
        jump["after"] - jump["before"]
        for record in line.records.values()
        for jump in record["jumps"]
        if jump["stage"] in (1, STAGES)
    ]
    return f"{statistics.mean(ends):+.3f}" if ends else "-"


def _against(
    played: Sequence[Line], read: Sequence[Line], none: Line, steps: int, which: str
) -> list[str]:
    """Where checkpoints and redundant computing beat CheckFree, at equal time."""
    name = "CheckFree sq" if which == OF_INTERIOR else "CheckFree+"
    ours = next((line for line in played if line.name == name), None)
    if ours is None:
        return []
    place = partial(by_time, steps=steps)
    mine = ours.above(none, place)
    found = {line.name: compare(line.above(none, place), mine) for line in read}
    kinds = {kind: [n for n, f in found.items() if f == kind] for kind in set(found.values())}
    return [
        f"- At equal time against {name} ({_range(mine.values(), '+.3f')}): "
        f"better is {', '.join(kinds.get('lower', [])) or 'nothing'}; "
        f"worse is {', '.join(kinds.get('higher', [])) or 'nothing'}; "
        f"no difference to {', '.join(kinds.get('no difference', [])) or 'any other'}."
    ]
