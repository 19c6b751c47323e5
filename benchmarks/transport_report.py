"""Turns samples of the transport benchmark into ratios and tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KINDS = ("raw", "hivemind", "shoal")
MIB, GIB = 2**20, 2**30
LARGE_BYTES = MIB  # from here on the target holds
TARGET_RATIO, TARGET_CONTROL_MS, TARGET_RATE = 0.9, 20.0, 20


class Cell(NamedTuple):
    """One place in the table: Mbit/s (None: no limit), round trip, bytes of a frame."""

    rate: int | None
    rtt_ms: int
    size: int


@dataclass(frozen=True)
class Figures:
    """One contestant's transfer."""

    num_bytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float

    @property
    def mib_per_s(self) -> float:
        """Bytes that arrived and were acknowledged, by the time of all."""
        return self.num_bytes / self.seconds / MIB

    @property
    def sender_per_gib(self) -> float:
        """Processor seconds of the sender per GiB, its children's with it."""
        return self.sender_cpu_s * GIB / self.num_bytes

    @property
    def receiver_per_gib(self) -> float:
        """The same of the receiver."""
        return self.receiver_cpu_s * GIB / self.num_bytes


Run = Mapping[str, Figures | None]


@dataclass
class Results:
    """All that was measured. A contestant that failed in a run has None there."""

    queue_ms: int | None
    cells: dict[Cell, list[Run]] = field(default_factory=lambda: defaultdict(list))
    control: dict[tuple[int | None, int], dict[tuple[str, bool], list[float]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def add(self, cell: Cell, run: Run) -> None:
        """Keep one run of a cell."""
        self.cells[cell].append(run)

    def add_control(
        self, rate: int | None, rtt_ms: int, kind: str, is_busy: bool, round_trips_ms: list[float]
    ) -> None:
        """Keep the round trips of small messages on one path."""
        self.control[rate, rtt_ms][kind, is_busy] = round_trips_ms

    def median(self, cell: Cell, kind: str, read: Callable[[Figures], float]) -> float | None:
        """The median over the runs in which the contestant did not fail."""
        return _median([read(figures) for run in self.cells[cell] if (figures := run[kind])])

    def ratio(self, cell: Cell, other: str) -> float | None:
        """Our speed by another's, within each run; the median."""
        pairs = [(run["shoal"], run[other]) for run in self.cells[cell]]
        return _median(
            [ours.mib_per_s / theirs.mib_per_s for ours, theirs in pairs if ours and theirs]
        )

    # --- reports ---------------------------------------------------------------------------

    def latest(self) -> str:
        """One line about the cell that was measured last."""
        cell = list(self.cells)[-1]
        speeds = ", ".join(
            f"{kind} {_number(self.median(cell, kind, lambda f: f.mib_per_s), 2)}" for kind in KINDS
        )
        return f"{_rate(cell.rate)}, RTT {cell.rtt_ms} ms, {_size(cell.size)}: {speeds} MiB/s"

    def latest_control(self) -> str:
        """One line about the control latencies that were measured last."""
        path = list(self.control)[-1]
        told = ", ".join(f"{kind} {_round_trips(self.control[path][kind, True])}" for kind in KINDS)
        return f"{_rate(path[0])}, RTT {path[1]} ms, control during bulk (median / p95): {told} ms"

    def summary(self) -> dict[str, object]:
        """The object that --json prints."""
        return {
            "ratio_to_raw": {_name(cell): self.ratio(cell, "raw") for cell in self.cells},
            "ratio_to_hivemind": {_name(cell): self.ratio(cell, "hivemind") for cell in self.cells},
            "control_median_ms": {
                f"{_rate(rate)}, RTT {rtt_ms} ms": {
                    kind: _median(found[kind, True]) for kind in KINDS
                }
                for (rate, rtt_ms), found in self.control.items()
            },
            "verdict": self.verdict(),
        }

    def verdict(self) -> list[str]:
        """How the targets of the project were met."""
        ratios = {c: r for c in self.cells if c.size >= LARGE_BYTES and (r := self.ratio(c, "raw"))}
        lines = []
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            told = "met" if ratios[worst] >= TARGET_RATIO else "NOT met"
            lines.append(
                f"At least {TARGET_RATIO} of raw py-libp2p for frames of 1 MiB and more: {told}; "
                f"the least is {ratios[worst]:.2f} ({_name(cell=worst)})."
            )
        median_ms = _median(self.control.get((TARGET_RATE, 0), {}).get(("shoal", True), []))
        if median_ms is not None:
            told = "met" if median_ms < TARGET_CONTROL_MS else "NOT met"
            lines.append(
                f"Control median under {TARGET_CONTROL_MS:.0f} ms during bulk on {TARGET_RATE} "
                f"Mbit/s: {told}; it is {median_ms:.1f} ms."
            )
        return lines

    def markdown(self) -> str:
        """The recorded page."""
        queue = f"a router's queue of {self.queue_ms} ms" if self.queue_ms else "loopback alone"
        lines = [
            "# Transport",
            "",
            f"Written by `python benchmarks/transport.py --write`. Two processes; {queue}; round",
            "trips by a proxy. *raw* is a stock py-libp2p host (Noise, Yamux), *hivemind* its P2P",
            "(go-libp2p in a process of its own, whose processor time is counted), *shoal* our",
            "data plane with checksums and acknowledgements. Each has as many frames under way as",
            "it lets; speeds are medians, ratios medians of those within a run; - is a failure.",
            "",
            *(f"- {line}" for line in self.verdict()),
            "",
            "| Mbit/s | RTT ms | frame | runs | raw MiB/s | hivemind | shoal | shoal / raw "
            "| shoal / hivemind | CPU s/GiB, sender: raw, hivemind, shoal | receiver |",
            f"|{'---|' * 11}",
            *map(self._speed_row, self.cells),
            "",
            "Round trips of a small acknowledged message in ms, median / 95th percentile, alone",
            "and while frames of 256 KiB fill the link (raw and hivemind: on a second stream of",
            "the same connection, which is how both are meant to be used):",
            "",
            f"| Mbit/s | RTT ms | {' | '.join(f'{kind} alone | during bulk' for kind in KINDS)} |",
            f"|{'---|' * (2 + 2 * len(KINDS))}",
            *map(self._control_row, self.control),
        ]
        return "\n".join(lines) + "\n"

    def _speed_row(self, cell: Cell) -> str:
        speeds = [_number(self.median(cell, kind, lambda f: f.mib_per_s), 2) for kind in KINDS]
        ratios = [_number(self.ratio(cell, other), 2) for other in ("raw", "hivemind")]
        spent = [
            ", ".join(_number(self.median(cell, kind, read), 1) for kind in KINDS)
            for read in (lambda f: f.sender_per_gib, lambda f: f.receiver_per_gib)
        ]
        head = [_rate(cell.rate), str(cell.rtt_ms), _size(cell.size), str(len(self.cells[cell]))]
        return f"| {' | '.join([*head, *speeds, *ratios, *spent])} |"

    def _control_row(self, path: tuple[int | None, int]) -> str:
        found = self.control[path]
        cells = [
            _round_trips(found.get((kind, busy), [])) for kind in KINDS for busy in (False, True)
        ]
        return f"| {_rate(path[0])} | {path[1]} | {' | '.join(cells)} |"


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _round_trips(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    return f"{statistics.median(values):.1f} / {statistics.quantiles(values, n=20)[-1]:.1f}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rate(rate: int | None) -> str:
    return "no limit" if rate is None else str(rate)


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"


def _name(cell: Cell) -> str:
    return f"{_rate(cell.rate)} Mbit/s, RTT {cell.rtt_ms} ms, {_size(cell.size)}"
