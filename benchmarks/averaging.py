"""The two averaging adapters beside hivemind's own averager; with and without a death.

    python benchmarks/averaging.py --write

Eight processes of each kind average 1, 10 and 100 MB among 2, 4 and all 8 of them; then one of
four is killed in the middle of a round of 100 MB, and the survivors average once more. On few
cores the members share them, so that processor seconds tell more than wall time. Every result is
compared with what it ought to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ends import End, EndFailed

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KINDS = ("exact", "hivemind", "plain")
MEGABYTE, FLOAT_BYTES = 10**6, 4
SIZES_MB, MEMBERS = (1, 10, 100), (2, 4, 8)
DEATH_MB, DEATH_MEMBERS = 100, 4
DEATHS_AT = (0.3, 0.6)  # killed after this share of a round's time; each in a group of its own
ANSWER_S = 120.0


class Cell(NamedTuple):
    """One place in the table."""

    size_mb: int
    members: int


@dataclass
class Outcome:
    """One round: what each member has, after how long, and the processor time of all."""

    results: list[str]
    errors: list[float]
    seconds: list[float]
    cpu_s: float

    def __str__(self) -> str:
        counted = Counter(self.results)
        return ", ".join(f"{count} {result}" for result, count in counted.items())


@dataclass
class Death:
    """The round in which a member was killed, and the next one without it."""

    broken: Outcome
    after: Outcome


@dataclass
class Standing:
    """What one kind did."""

    rounds: dict[Cell, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    deaths: dict[float, Death] = field(default_factory=dict)
    failure: str = ""

    def median_s(self, cell: Cell) -> float:
        """Until the last member had its result."""
        return statistics.median(max(outcome.seconds) for outcome in self.rounds[cell])

    def median_cpu_s(self, cell: Cell) -> float:
        """Of all members together."""
        return statistics.median(outcome.cpu_s for outcome in self.rounds[cell])


class Group:
    """The processes of one kind."""

    def __init__(self, kind: str, num: int, stack: ExitStack) -> None:
        self._kind, self._stack = kind, stack
        self.ends: list[End] = [self._start("")]
        self.ends += [self._start(self.ends[0].address) for _ in range(num - 1)]
        for end in self.ends:
            _ = end.address
        self._num_rounds = 0

    def _start(self, first: str) -> End:
        if self._kind == "plain":
            end = End(HERE / "averaging_plain.py", *([first] if first else []))
        else:
            end = End(HERE / "averaging_ours.py", self._kind)
        self._stack.callback(end.stop)
        return end

    def begin(self, ends: list[End], size_mb: int) -> None:
        """Order a round from some of the members."""
        self._num_rounds += 1
        values = range(1, len(ends) + 1)
        for end, value in zip(ends, values, strict=True):
            end.tell(
                round=self._num_rounds, value=value, sum=sum(values),
                elements=size_mb * MEGABYTE // FLOAT_BYTES, addresses=[e.address for e in ends],
            )  # fmt: skip

    def finish(self, ends: list[End]) -> Outcome:
        """Collect what they have."""
        answers: list[dict[str, Any]] = [end.answer(ANSWER_S) for end in ends]
        return Outcome(
            [answer["result"] for answer in answers],
            [answer["error"] for answer in answers if "error" in answer],
            [answer["s"] for answer in answers],
            sum(answer["cpu_s"] for answer in answers),
        )

    def round(self, ends: list[End], size_mb: int) -> Outcome:
        """A whole round."""
        self.begin(ends, size_mb)
        return self.finish(ends)

    def die(self, ends: list[End], after_s: float) -> Death:
        """Kill one of four members so long after a round began; let the others average again."""
        self.begin(ends, DEATH_MB)
        time.sleep(after_s)
        ends[1].kill()
        survivors = [ends[0], *ends[2:]]
        broken = self.finish(survivors)
        return Death(broken, self.round(survivors, DEATH_MB))


def _num_ends(cells: list[Cell], has_death: bool) -> int:
    most = max(cell.members for cell in cells)
    return max(most, len(DEATHS_AT) * DEATH_MEMBERS) if has_death else most


def measure(kind: str, runs: int, cells: list[Cell], has_death: bool) -> Standing:
    """Everything of one kind."""
    standing = Standing()
    with ExitStack() as stack:
        try:
            group = Group(kind, _num_ends(cells, has_death), stack)
            for cell in cells:
                ends = group.ends[: cell.members]
                group.round(ends, cell.size_mb)  # connections, buffers
                standing.rounds[cell] = [group.round(ends, cell.size_mb) for _ in range(runs)]
                print(f"{kind}, {cell}: {standing.median_s(cell):.2f} s", file=sys.stderr)
            if has_death:
                usual_s = standing.median_s(Cell(DEATH_MB, DEATH_MEMBERS))
                for number, share in enumerate(DEATHS_AT):
                    ends = group.ends[number * DEATH_MEMBERS : (number + 1) * DEATH_MEMBERS]
                    group.round(ends, DEATH_MB)
                    standing.deaths[share] = group.die(ends, share * usual_s)
        except EndFailed:
            standing.failure = "a member ended or gave no answer"
    return standing


def markdown(standings: dict[str, Standing], cells: list[Cell], runs: int) -> str:
    """The recorded page."""
    lines = [
        "# Averaging",
        "",
        "Written by `python benchmarks/averaging.py --write`. All members on one computer;",
        f"medians of {runs} rounds after one that is not counted: seconds until the last member",
        "has its result (processor seconds of all members). *exact*: our sum, the same bytes",
        "everywhere. *hivemind*: its all-reduce behind our agreement. *plain*: hivemind's averager",
        "as it comes, time to find the group included.",
        "",
        f"| MB | members | {' | '.join(standings)} | largest error |",
        f"|{'---|' * (3 + len(standings))}",
        *(_row(cell, standings) for cell in cells),
        "",
        f"One of {DEATH_MEMBERS} members is killed in a round of {DEATH_MB} MB, after a share of",
        "its usual time: what the survivors hold, when the last of them knew, and the next round",
        "without it. *Refused* is right: whoever has no whole sum says so, and nothing is applied;",
        "*exact* and *hivemind* give a round up when the session is lost, as in a swarm. What only",
        "some have is not applied either: a step is applied when all have prepared it.",
        "",
        "| kind | killed at | survivors' results | s | next round without it | s |",
        f"|{'---|' * 6}",
        *(row for kind, standing in standings.items() for row in _death_rows(kind, standing)),
        *(
            f"\n{kind}: {standing.failure}."
            for kind, standing in standings.items()
            if standing.failure
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(cell: Cell, standings: dict[str, Standing]) -> str:
    cells = []
    for standing in standings.values():
        outcomes = standing.rounds.get(cell)
        if not outcomes:
            cells.append("-")
            continue
        wrong = [str(o) for o in outcomes if set(o.results) != {"right"}]
        times = f"{standing.median_s(cell):.2f} ({standing.median_cpu_s(cell):.2f})"
        cells.append(f"{times}; {wrong[0]}" if wrong else times)
    errors = [
        f"{kind} {max((e for o in standing.rounds[cell] for e in o.errors), default=0):.0e}"
        for kind, standing in standings.items()
        if cell in standing.rounds
    ]
    return f"| {cell.size_mb} | {cell.members} | {' | '.join(cells)} | {', '.join(errors)} |"


def _death_rows(kind: str, standing: Standing) -> list[str]:
    return [
        f"| {kind} | {share:.0%} | {death.broken} | {max(death.broken.seconds):.1f} "
        f"| {death.after} | {max(death.after.seconds):.1f} |"
        for share, death in standing.deaths.items()
    ]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_MB, metavar="MB")
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS)
    parser.add_argument("--no-deaths", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args()
    cells = [Cell(size, num) for num in options.members for size in options.sizes]
    has_death = Cell(DEATH_MB, DEATH_MEMBERS) in cells and not options.no_deaths
    standings = {kind: measure(kind, options.runs, cells, has_death) for kind in options.kinds}
    page = markdown(standings, cells, options.runs)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "averaging.md").write_text(page)
    told = {
        kind: {
            f"{cell.size_mb} MB, {cell.members} members": {
                "s": standing.median_s(cell), "cpu_s": standing.median_cpu_s(cell),
                "results": [str(outcome) for outcome in standing.rounds[cell]],
            }
            for cell in cells if standing.rounds[cell]
        }
        for kind, standing in standings.items()
    }  # fmt: skip
    print(json.dumps(told) if options.json else page)


if __name__ == "__main__":
    main()
