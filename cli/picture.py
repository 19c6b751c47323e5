"""The loss curve: as a PNG file, and as a few lines of text for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def resample(values: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` means of consecutive runs of ``values``."""
    count = min(width, len(values))
    edges = [round(k * len(values) / count) for k in range(count + 1)] if count else [0]
    runs = [values[a:b] for a, b in pairwise(edges)]
    return [sum(run) / len(run) for run in runs]


def chart(values: Sequence[float], width: int = 60, height: int = 6) -> list[str]:
    """Draw ``values`` (nats) as ``height`` lines of block characters with a scale at the left."""
    finite = resample([v for v in values if math.isfinite(v)], width)
    if not finite:
        return []
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    # The lowest value keeps one eighth, so that every step is seen.
    eighths = [1 + round((v - low) / span * (8 * height - 1)) for v in finite]
    lines = []
    for row in reversed(range(height)):
        cells = "".join(_EIGHTHS[max(0, min(8, e - 8 * row))] for e in eighths)
        label = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        lines.append(f"{label:>6} {cells.rstrip()}")
    return lines


def draw_loss(
    path: Path,
    losses: Sequence[tuple[int, float]],
    validation: Sequence[tuple[int, float]],
    marks: dict[str, float],
) -> None:
    """Write the loss curve (nats per token by step) as PNG, with ``marks`` as level lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*losses, strict=True), label="training loss", color="tab:blue")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", label="validation loss", color="tab:orange")
    for style, (name, level) in zip(("--", ":"), marks.items(), strict=False):
        axes.axhline(level, linestyle=style, color="gray", label=f"{name} ({level:.2f})")
    axes.set(xlabel="step", ylabel="nats per token", title="Loss of the swarm")
    axes.legend()
    figure.savefig(path, format="png")
