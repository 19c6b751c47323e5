"""Turns samples of the efficiency benchmark into numbers and tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field

from swarm_probe import Reading, SwarmSample

TORCH_PHASES = ("forward", "backward", "edge", "update")
COLUMNS = (*TORCH_PHASES, "averaging", "waiting", "cpu daemon", "cpu side-car")


@dataclass
class Contest:
    """All samples of one model width: tokens/s by contestant, and the swarms' accounts."""

    width: int
    speeds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    swarms: list[SwarmSample] = field(default_factory=list)

    def median(self, name: str) -> float:
        """The median tokens/s of one contestant."""
        return statistics.median(self.speeds[name])

    @property
    def plain(self) -> float:
        """The better plain loop."""
        return max(self.median("plain_1_thread"), self.median("plain_2_threads"))

    @property
    def ratio(self) -> float:
        """The swarm's speed by the plain loop's."""
        return self.median("swarm") / self.plain

    @property
    def ceiling(self) -> float:
        """What the cores give to two independent processes, by the plain loop's speed."""
        return self.median("two_processes") / self.plain

    def account(self) -> tuple[float, dict[int, Reading]]:
        """Wall seconds of all measured steps, and what the stages spent in them, by stage."""
        totals: dict[int, Reading] = defaultdict(lambda: defaultdict(float))
        for sample in self.swarms:
            for stage, reading in sample.spent.items():
                for name, value in reading.items():
                    totals[stage][name] += value
        return sum(sample.seconds for sample in self.swarms), totals


def summary(contests: list[Contest], wire: str, cores: int) -> dict[str, object]:
    """The object that --json prints."""
    return {
        "ratio": {str(c.width): round(c.ratio, 3) for c in contests},
        "ceiling": {str(c.width): round(c.ceiling, 3) for c in contests},
        "tokens_per_s": {
            str(c.width): {name: round(c.median(name)) for name in c.speeds} for c in contests
        },
        "runs": {
            str(c.width): {name: [round(s) for s in speeds] for name, speeds in c.speeds.items()}
            for c in contests
        },
        "share_of_core_seconds": {str(c.width): shares(c, cores) for c in contests},
        "wire_dtype": wire,
        "cores": cores,
    }


def shares(contest: Contest, cores: int) -> dict[str, float]:
    """Where the cores' time went, as shares of wall time x cores."""
    seconds, stages = contest.account()
    whole = seconds * cores
    torch_s = sum(reading.get(p, 0.0) for reading in stages.values() for p in TORCH_PHASES)
    daemon_s = sum(reading["cpu daemon"] for reading in stages.values())
    sidecar_s = sum(reading["cpu side-car"] for reading in stages.values())
    parts = {
        "torch, as timed by the stages": torch_s,
        "processors in daemons": daemon_s,
        "processors in side-cars": sidecar_s,
        "everything else, and idle": whole - daemon_s - sidecar_s,
    }
    return {name: round(value / whole, 3) for name, value in parts.items()}


def markdown(contests: list[Contest], wire: str, cores: int) -> str:
    """The recorded page: speeds, then where the swarm's time went."""
    lines = [
        "# Efficiency of a swarm on one computer",
        "",
        "Written by `python benchmarks/efficiency.py --write`. One data node and 3 stages x 2",
        f"holders on {cores} cores, {wire} on the wire, 6 layers, microbatch 8 x 128, quota 16.",
        "Medians of tokens/s over interleaved runs.",
        "",
        "| width | runs | plain, 1 thread | plain, 2 threads | two processes | swarm "
        "| ratio | ceiling |",
        "|---|---|---|---|---|---|---|---|",
        *(_speed_row(contest) for contest in contests),
    ]
    for contest in contests:
        lines += ["", *_account_table(contest, cores)]
    return "\n".join(lines) + "\n"


def _speed_row(c: Contest) -> str:
    names = ("plain_1_thread", "plain_2_threads", "two_processes", "swarm")
    speeds = " | ".join(f"{c.median(name):.0f}" for name in names)
    return f"| {c.width} | {len(c.swarms)} | {speeds} | {c.ratio:.2f} | {c.ceiling:.2f} |"


def _account_table(contest: Contest, cores: int) -> list[str]:
    seconds, stages = contest.account()
    steps = sum(sample.steps for sample in contest.swarms)
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares(contest, cores).items())
    return [
        f"## Width {contest.width}: where the time goes",
        "",
        f"A step takes {seconds / steps:.2f} s. Of wall time x cores: {told}.",
        "Seconds per step, summed over the nodes of a stage (torch phases count wall time, so",
        "they include waiting for a core; waiting is time without work):",
        "",
        f"| stage | {' | '.join(COLUMNS)} | MB in | MB out |",
        f"|{'---|' * (len(COLUMNS) + 3)}",
        *(_stage_row(stage, stages[stage], steps) for stage in sorted(stages)),
    ]


def _stage_row(stage: int, reading: Reading, steps: int) -> str:
    columns = " | ".join(f"{reading.get(name, 0.0) / steps:.3f}" for name in COLUMNS)
    moved = [
        sum(value for name, value in reading.items() if name.startswith(f"bytes {direction}"))
        for direction in ("in", "out")
    ]
    return f"| {stage} | {columns} | {moved[0] / steps / 1e6:.2f} | {moved[1] / steps / 1e6:.2f} |"
