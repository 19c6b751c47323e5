"""The tables of the routing benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Result = dict[str, Any]
SETTLING_TICKS = 80
# What was asked for: the median and the worst ratio, by the start of a family's name.
TARGETS = {
    "N=33": (1.001, None),
    "N=97": (1.005, 1.02),
    "N=1001": (1.01, 1.01),
    "N=100, 4": (1.02, 1.02),
}
OTHERS = ("greedy", "swarm", "petals", "dt-fm", "random")
CURVE = ("10", "20", "30", "40", "60", "80", "100", "150", "200", "300", "400")


def report(results: Sequence[Result]) -> str:
    """All tables for which there are results, in Markdown."""
    parts = [_cost, _curves, _others, _forms, _bursts, _messages]
    found = [text for part in parts if (text := part(results))]
    return "\n\n".join(["# Routing", _HEAD, *found]) + "\n"


_HEAD = """\
Written by `python benchmarks/routing.py --write`. Real messages between simulated nodes: links'
latencies (20-80 ms in the random families, up to 265 ms between regions), 10 % jitter, 1 % of all
messages lost. A tick is 2 s, in which each node acts once. Ratios are mean path costs over those of
the optimum (HiGHS), with several data nodes over the lower bound of the multicommodity program."""


def _cost(results: Sequence[Result]) -> str:
    rows = []
    for family, found in _by_family(results, "cost"):
        ratios = [r["ratio"] for r in found]
        full = sum(r["flow"] == r["optimal_flow"] for r in found)
        greedy = [r["others"]["greedy"][1] for r in found]
        beaten = sum(r["ratio"] <= g for r, g in zip(found, greedy, strict=True))
        rows.append(
            (
                family,
                found[0]["ticks"],
                f"{full} of {len(found)}",
                f"{100 * statistics.mean(r['held'] for r in found):.1f} %",
                f"{statistics.median(ratios):.4f}",
                f"{max(ratios):.4f}",
                _target(family),
                f"{statistics.median(greedy):.3f}",
                f"{beaten} of {len(found)}",
                _middle_and_most(r["to_max_flow"] for r in found),
                _middle_and_most(r["to_converge"] for r in found),
            )
        )
    heads = (
        "family", "ticks", "maximum flow", "held", "median", "worst", "asked", "greedy, median",
        "not above greedy", "ticks to maximum flow", "ticks to settle",
    )  # fmt: skip
    return _section("Cost over the optimum", heads, rows, _COST_NOTE)


_COST_NOTE = """\
`greedy` knows everything and takes the cheapest path that is left, again and again. Pairs of ticks
are the median and the most. Held: how much of the last quarter's ticks all that can flow did; a
flow counts only while both ends of all its links agree, which they do not in the middle of a
change. Settled: within 0.1 % of the cost at the end."""


def _curves(results: Sequence[Result]) -> str:
    rows = []
    for family, found in _by_family(results, "cost"):
        cells = []
        for tick in CURVE:
            noted = [r["curve"][tick] for r in found if tick in r["curve"]]
            known = [ratio for ratio in noted if ratio is not None]
            is_whole = known and len(known) == len(noted)
            missing = "flows missing" if noted else ""
            cells.append(f"{statistics.median(known):.4f}" if is_whole else missing)
        rows.append((family, *cells))
    return _section("The median over time, by ticks", ("family", *CURVE), rows, "")


def _others(results: Sequence[Result]) -> str:
    rows = []
    for family, found in _by_family(results, "cost"):
        cells = []
        for name in OTHERS:
            flow = statistics.mean(r["others"][name][0] / r["optimal_flow"] for r in found)
            ratio = statistics.median(r["others"][name][1] for r in found)
            cells.append(
                f"{ratio:.3f}" if flow > 0.999 else f"{ratio:.3f} ({100 * flow:.0f} % flow)"
            )
        rows.append((family, *cells))
    return _section("Other policies on the same networks", ("family", *OTHERS), rows, _OTHERS_NOTE)


_OTHERS_NOTE = """\
Fixed assignments with full information, the median ratio; where not all that could flow does, its
part in parentheses. Path cost is not time per step: `shoal simulate training` compares that."""


def _forms(results: Sequence[Result]) -> str:
    rows = []
    plain = {r["seed"]: r for r in results if r["table"] == "forms" and not r["is_arithmetic"]}
    paper = {r["seed"]: r for r in results if r["table"] == "forms" and r["is_arithmetic"]}
    both = sorted(plain.keys() & paper.keys())
    if both:
        worse = [paper[s]["fair_mean_s"] / plain[s]["fair_mean_s"] for s in both]
        own = [
            f"{statistics.median(form[s]['ratio'] for s in both):.4f}" for form in (plain, paper)
        ]
        loss = f"{statistics.median(worse):.3f}, at worst {max(worse):.3f}"
        rows = [(plain[both[0]]["family"], len(both), *own, loss)]
    heads = (
        "family", "seeds", "harmonic: over its optimum", "arithmetic: over its optimum",
        "what arithmetic routes cost, harmonic ones = 1",
    )  # fmt: skip
    return _section("Which mean of a link's two bandwidths", heads, rows, _FORMS_NOTE)


_FORMS_NOTE = """\
Each node sends at a tenth of what it receives at. The paper averages the two arithmetically, and so
believes in transfers that are several times too fast; the last column is judged harmonically, by
the seconds that forward and backward really take."""


def _bursts(results: Sequence[Result]) -> str:
    rows = []
    found = [r for r in results if r["table"] == "bursts"]
    for family, part in sorted({(r["family"], r["burst"]) for r in found}):
        group = [r for r in found if (r["family"], r["burst"]) == (family, part)]
        times = [r["recovered"] for r in group]
        known = sorted(t for t in times if t is not None)
        total = len(times)
        rows.append(
            (
                family,
                f"{100 * part:.0f} %",
                total,
                f"{statistics.median(known):.0f}" if known else "",
                max(known, default=""),
                f"{sum(t <= 30 for t in known)} of {total}",
                f"{sum(t <= 60 for t in known)} of {total}",
                total - len(known),
                f"{statistics.median(r['ratio'] for r in group):.4f}",
            )
        )
    heads = (
        "family", "killed", "seeds", "median ticks", "most", "within 30", "within 60", "never",
        "ratio 20 ticks later",
    )  # fmt: skip
    return _section("Bursts", heads, rows, _BURSTS_NOTE)


_BURSTS_NOTE = """\
Holders killed at once; ticks from when the last survivor noticed (two ticks later) until the
survivors' maximum flow is whole again; a run ends 20 ticks after that, while costs still fall.
Asked: within 30 ticks in 99 of 100 seeds, 60 in all."""


def _messages(results: Sequence[Result]) -> str:
    rows = []
    for r in results:
        if r["table"] != "messages":
            continue
        later, most = r["messages"][1:], r["most_messages"]
        has_settled = r["ticks"] >= SETTLING_TICKS
        rows.append(
            (
                r["family"],
                f"{r['messages'][0]:.0f}",
                f"{statistics.mean(later):.0f}",
                f"{r['messages_last']:.1f}" if has_settled else "not run so long",
                f"{max(holder for _, holder in most)}",
                f"{max(data for data, _ in most)}",
                f"{r['cpu_us']:.0f}",
                f"{r['flow']} of {r['optimal_flow']} at {r['ticks']}",
            )
        )
    heads = (
        "swarm", "messages per node, first tick", "each of ticks 2-5", "ticks 61-80",
        "busiest holder in one tick", "data node in one tick", "processor us per node and tick",
        "flows at tick",
    )  # fmt: skip
    return _section("Messages", heads, rows, _MESSAGES_NOTE)


_MESSAGES_NOTE = """\
One run each, with one data node, which wants all that can flow. Columns 2 and 3: while routes grow.
A node looks at thirty peers of the next stage at most, and tells twelve at once what changed; in
small swarms a stage has fewer (4 at N=33, 10 at N=100)."""


def _by_family(results: Sequence[Result], table: str) -> list[tuple[str, list[Result]]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        if result["table"] == table:
            found.setdefault(result["family"], []).append(result)
    return list(found.items())


def _target(family: str) -> str:
    for start, (median, worst) in TARGETS.items():
        if family.startswith(start):
            return f"{median}" if worst is None else f"{median}, worst {worst}"
    return ""


def _middle_and_most(values: Iterable[int | None]) -> str:
    every = list(values)
    known = [v for v in every if v is not None]
    if not known:
        return "never"
    text = f"{statistics.median(known):.0f}, {max(known)}"
    return text if len(known) == len(every) else f"{text}; {len(every) - len(known)} never"


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], note: str) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n\n".join(filter(None, [f"## {title}", "\n".join(lines), note]))
