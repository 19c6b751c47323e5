"""Held-out loss of one seed by iterations and by simulated time, with the losses of stages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator
from recovery_baselines import ITERATION_S
from recovery_report import Line, read_lines, run_lines
from recovery_runs import ARMS, failures

_INK, _FAINT = "#22303c", "#8a98a5"
_COLOURS = {
    "none": "#22303c", "CheckFree sq": "#2f6fb3", "CheckFree+": "#2f6fb3", "uniform": "#3a9a5b",
    "copy": "#d9772b", "naive copy of the ends": "#d9772b", "random": "#7a5cc4",
}  # fmt: skip
_CHECKPOINTS, _REDUNDANT = "#c2453d", "#b0892f"
_SHOWN = {
    "interior": ("none", "CheckFree sq", "uniform", "copy", "random"),
    "all": ("none", "CheckFree+", "naive copy of the ends"),
}


def draw(path: Path, records: Sequence[dict[str, Any]], steps: int, seed: int = 0) -> None:
    """Write a PNG: a row per schedule of failures."""
    records = [r for r in records if r["steps"] == steps]
    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for row, (axes, which) in enumerate(
        zip(figure.subplots(2, 2, sharey="row"), _SHOWN, strict=True)
    ):
        lines = [ln for ln in run_lines(records, ARMS) if ln.name in _SHOWN[which]]
        lines.sort(key=lambda line: _SHOWN[which].index(line.name))
        read = read_lines(records, which, steps)
        lines += [ln for ln in read if "100" in ln.name or "paper" in ln.name]
        _draw_lines(axes, [ln for ln in lines if seed in ln.courses], seed, steps)
        for step, stage in failures(seed, steps, which):
            axes[0].annotate(
                str(stage), (step, 1.0), xycoords=("data", "axes fraction"), fontsize=7,
                color=_FAINT, ha="center", va="bottom",
            )  # fmt: skip
        title = "stages 2 to 5 are lost" if which == "interior" else "the ends are lost too"
        axes[0].set_ylabel(f"loss, nats per byte; {title}", color=_INK)
        if row:
            axes[0].set_xlabel("iterations; above: which stage is lost", color=_INK)
            axes[1].set_xlabel("simulated hours", color=_INK)
    figure.savefig(path, format="png")


def _draw_lines(axes: Sequence[Axes], lines: Sequence[Line], seed: int, steps: int) -> None:
    for line in lines:
        course = line.courses[seed]
        is_redundant = line.name.startswith("redundant")
        colour = _COLOURS.get(line.name, _REDUNDANT if is_redundant else _CHECKPOINTS)
        if not is_redundant:  # by iterations it is the run without failures
            axes[0].plot(*zip(*course.by_iteration, strict=True), color=colour, lw=1.2)
        hours = [(second / 3600, loss) for second, loss in course.by_second]
        axes[1].plot(*zip(*hours, strict=True), color=colour, lw=1.2, label=line.name)
    axes[0].set_xlim(0, steps)
    axes[1].set_xlim(0, steps * ITERATION_S / 3600)
    for part in axes:
        part.set_yscale("log")
        part.yaxis.set_major_locator(FixedLocator([0.6, 0.8, 1, 1.5, 2, 3, 4, 6]))
        part.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        part.yaxis.set_minor_locator(NullLocator())
        part.spines[["top", "right"]].set_visible(False)
        part.tick_params(colors=_INK, labelsize=8)
    axes[1].legend(frameon=False, fontsize=8, labelcolor=_INK)
