"""The page that ``benchmarks/training.py`` writes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from training_arms import BESIDE_PAPER, CHANGED, SETTINGS, SWARM_TIMEOUT_S

from protocol.simulation.training import POLICIES

CHURNS = (0.0, 0.1, 0.2)
CLAIM = 0.45  # "up to 45 % less training time" (arXiv 2509.21221, abstract)
# Who is faster in at least so many of the seeds is called faster; between the two is a tie.
FASTER = 0.75


class Cell(NamedTuple):
    """One run."""

    setting: str
    churn: float
    seed: int
    policy: str


Results = Mapping[Cell, Mapping[str, Any]]


class Figures(NamedTuple):
    """One policy in one column: seconds per step of each seed, by gwtf's of the same seed."""

    seconds: list[float]
    ratios: list[float]
    wasted: float

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def num_faster(self) -> int:
        """In how many seeds it is faster than gwtf."""
        return sum(ratio < 1 for ratio in self.ratios)

    @property
    def is_faster(self) -> bool:
        """Faster than gwtf in most seeds."""
        return self.num_faster >= FASTER * len(self.ratios)

    @property
    def is_tie(self) -> bool:
        """Neither of the two is faster in most seeds."""
        return not self.is_faster and self.num_faster > (1 - FASTER) * len(self.ratios)


def figures(results: Results, setting: str, churn: float, policy: str) -> Figures | None:
    """Gather the seeds of one policy; None if a run did not end."""
    cells = [c for c in results if c[:2] == (setting, churn) and c.policy == policy]
    if not all(results[c]["is_complete"] for c in cells):
        return None
    seconds = [results[c]["step_s"]["mean"] for c in cells]
    base = [results[c._replace(policy="gwtf")]["step_s"]["mean"] for c in cells]
    wasted = statistics.median(results[c]["wasted_share"] for c in cells)
    return Figures(seconds, [a / b for a, b in zip(seconds, base, strict=True)], wasted)


def table(
    results: Results, setting: str, policies: Sequence[str], churns: Sequence[float]
) -> list[str]:
    """Rows by policy, columns by churn: seconds per step, by those of gwtf, and what was wasted."""
    heads = [f"{100 * churn:g} %: s/step | by gwtf's | in vain" for churn in churns]
    lines = [f"| policy | {' | '.join(heads)} |", "|---" * (1 + 3 * len(churns)) + "|"]
    for policy in policies:
        found = [figures(results, setting, churn, policy) for churn in churns]
        lines.append(f"| {policy} | {' | '.join(map(_cells, found))} |")
    return lines


def _cells(found: Figures | None) -> str:
    if found is None:
        return "hangs | - | -"
    seconds, ratios = _spread(found.seconds, ".0f"), _spread(found.ratios, ".2f")
    return f"{seconds} | {ratios} | {100 * found.wasted:.1f} %"


def _spread(values: list[float], form: str) -> str:
    middle = format(statistics.median(values), ".1f" if form == ".0f" else form)
    return f"{middle} ({format(min(values), form)}-{format(max(values), form)})"


def verdict(results: Results, setting: str, churn: float) -> str:
    """Where the paper's claim holds, and where gwtf is not the fastest."""
    names = _rows(setting)
    found = {
        p: f
        for p in names
        if not p.startswith("gwtf") and (f := figures(results, setting, churn, p))
    }
    saved = {policy: 1 - 1 / figure.ratio for policy, figure in found.items()}
    most = max(saved, key=lambda policy: saved[policy])
    swarms = ", ".join(f"{100 * saved[p]:.0f} % ({p})" for p in saved if p.startswith("swarm"))
    faster = [f"{p} ({f.ratio:.2f})" for p, f in found.items() if f.is_faster]
    ties = [f"{p} ({f.ratio:.2f})" for p, f in found.items() if f.is_tie]
    return (
        f"- {SETTINGS[setting].title}, churn {100 * churn:g} %: at most {100 * saved[most]:.0f} % "
        f"less time (than {most}); the paper's 45 % is "
        f"{'reached' if saved[most] >= CLAIM else 'not reached'}. Than SWARM: {swarms}. "
        f"Faster than gwtf: {', '.join(faster) or 'nobody'}. Ties: {', '.join(ties) or 'none'}."
    )


def report(results: Results, steps: int) -> str:
    """The page; a section that was not run is left out."""
    lines = [
        "# Training",
        "",
        "Written by `python benchmarks/training.py --write`. Simulated, in ten regions: "
        f"{steps} steps, medians over seeds",
        '(the least and the greatest in brackets); "by gwtf\'s" is the ratio within a seed. The '
        "time that a policy needs before",
        "its first step is not counted. Churn is the part of the holders that dies in each step. "
        "In vain is computing that no",
        "sum contains. Greedy and petals know the room of everybody at every moment, for nothing. "
        f"Faster: in at least {100 * FASTER:g} %",
        "of the seeds; a tie: neither of the two is.",
    ]
    ran = [name for name in SETTINGS if _seeds(results, name, "gwtf")]
    for name in ran:
        seeds = _seeds(results, name, "gwtf")
        lines += ["", f"## {SETTINGS[name].title} ({seeds} seeds)", "", *_about(name), ""]
        lines += table(results, name, _rows(name), CHURNS)
    if seeds := min(_seeds(results, "mixed", policy) for policy in CHANGED):
        lines += ["", f"## Where the lead comes from ({seeds} seeds)", "", *_about("changed"), ""]
        lines += table(results, "mixed", ["gwtf", *CHANGED], CHURNS[1:])
    lines += ["", "## What follows", ""]
    lines += [verdict(results, name, churn) for name in ran for churn in CHURNS]
    return "\n".join([*lines, ""])


def _seeds(results: Results, setting: str, policy: str) -> int:
    return len({c.seed for c in results if c.setting == setting and c.policy == policy})


def _rows(setting: str) -> list[str]:
    return [*POLICIES, *(BESIDE_PAPER if setting == "paper" else ())]


def _about(name: str) -> list[str]:
    mixed, paper = SETTINGS["mixed"], SETTINGS["paper"]
    return {
        "mixed": [
            f"{mixed.nodes} nodes, {mixed.stages} stages, {mixed.workload.microbatches} "
            "microbatches of 8 MiB activations; room for 2 to 5 microbatches, 0.2, 0.4 or 0.8 s "
            "for each."
        ],
        "alike": ["The same, with room for 3 and 0.4 s everywhere."],
        "paper": [
            f"Fixed before the first run: {paper.nodes} nodes, 2 of them data nodes, "
            f"{paper.stages} stages of 4 LLaMA layers (width 2,048, 4,096 tokens: 16 MiB), room "
            f"for 1 to 3, {paper.workload.microbatches} microbatches. What died in a sum is lost, "
            "for every policy: neither SWARM nor GWTF's prototype computes it again. A host that "
            f'vanishes is missed after {paper.workload.detect_s:g} s, as in our daemon; "its '
            f'time-out": SWARM as released waits {SWARM_TIMEOUT_S:g} s for an answer.'
        ],
        "changed": [
            "The heterogeneous swarm again: others with gwtf's rule for newcomers, gwtf without "
            "it, and exact minimum-cost flows that everybody knows at once (what perfect routing "
            "of whole paths would give)."
        ],
    }[name]
