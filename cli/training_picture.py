"""A simulated training run as a Gantt chart: who computed what and when, and who died."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.simulation.training import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _IDLE = "#22303c", "#8a98a5", "#f1f4f6"
_COLOURS = {"forward": "#2f6fb3", "backward": "#3a9a5b", "head": "#7a5cc4", "in vain": "#d9772b"}
_CRASH = "#c2453d"
_STEPS_SHOWN = 3
_ROW = 0.86


def draw_gantt(path: Path, outcome: Outcome) -> None:
    """Write a PNG of the first steps: a row per node, grouped by stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end_s = outcome.steps[:_STEPS_SHOWN][-1].end_s if outcome.steps else 1.0
    nodes = [n for n in outcome.stages if outcome.lives[n][0] < end_s]
    nodes.sort(key=lambda n: (outcome.stages[n], n))
    rows = {node: row for row, node in enumerate(nodes)}
    figure = Figure(figsize=(12, 1.6 + 0.17 * len(nodes)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_lives(axes, outcome, rows, end_s)
    _draw_spans(axes, outcome, rows, end_s)
    _draw_marks(axes, outcome, rows, end_s)
    _label(axes, outcome, rows)
    start_s = outcome.steps[0].start_s if outcome.steps else 0.0
    axes.set(xlim=(start_s, end_s), ylim=(len(rows) - 0.4, -0.6), xlabel="seconds")
    shown = min(_STEPS_SHOWN, len(outcome.steps))
    mean_s = sum(outcome.seconds) / len(outcome.seconds) if outcome.seconds else 0.0
    title = f"{outcome.policy}: {mean_s:.1f} s per step; the first {shown} of {len(outcome.steps)}"
    axes.set_title(title, loc="left", color=_INK, fontsize=11)
    figure.savefig(path, format="png")


def _draw_lives(axes: Axes, outcome: Outcome, rows: dict[int, int], end_s: float) -> None:
    """Pale where a node is there and idle, white where it is not."""
    for node, row in rows.items():
        born_s, died_s = outcome.lives[node]
        axes.barh(row, min(died_s, end_s) - born_s, left=born_s, height=_ROW, color=_IDLE)


def _draw_spans(axes: Axes, outcome: Outcome, rows: dict[int, int], end_s: float) -> None:
    for name, colour in _COLOURS.items():
        spans = [
            span
            for span in outcome.spans
            if span.start_s < end_s and name == (span.kind.value if span.is_useful else "in vain")
        ]
        axes.barh(
            [rows[span.node] for span in spans],
            [span.end_s - span.start_s for span in spans],
            left=[span.start_s for span in spans],
            height=_ROW,
            color=colour,
            label="loss" if name == "head" else name,
        )


def _draw_marks(axes: Axes, outcome: Outcome, rows: dict[int, int], end_s: float) -> None:
    crashes = [crash for crash in outcome.crashes if crash.time_s < end_s]
    axes.scatter(
        [crash.time_s for crash in crashes],
        [rows[crash.node] for crash in crashes],
        marker="x", s=34, color=_CRASH, lw=1.6, zorder=4, label="dies",
    )  # fmt: skip
    for step in outcome.steps[:_STEPS_SHOWN]:
        axes.axvline(step.end_s, color=_INK, lw=1.0)


def _label(axes: Axes, outcome: Outcome, rows: dict[int, int]) -> None:
    """Name the stages at the left, with a line between two of them."""
    stages = sorted({outcome.stages[node] for node in rows})
    middles = []
    for stage in stages:
        mine = [row for node, row in rows.items() if outcome.stages[node] == stage]
        middles.append((mine[0] + mine[-1]) / 2)
        axes.axhline(mine[-1] + 0.5, color=_FAINT, lw=0.6)
    axes.set_yticks(middles, ["data" if s == 0 else f"stage {s}" for s in stages])
    axes.tick_params(colors=_INK, labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize=8, labelcolor=_INK, ncols=6, loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
