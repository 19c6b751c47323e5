"""What a routing simulation looks like: the network with its flows, and how they settled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import nan
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.routing.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT, _PALE = "#22303c", "#8a98a5", "#e6ebef"
_COLOURS = ("#2f6fb3", "#d9772b", "#3a9a5b", "#b5428f", "#7a5cc4", "#a08a1f", "#2a9fb0", "#c2453d")
_LABELLED = 14  # holders in the fullest stage up to which each has its name written
_SWEEPS = 12
_FLOOR_PERCENT = 0.01

Place = tuple[float, float]


def draw_network(path: FilePath, trial: Trial) -> None:
    """Write a PNG with a column per stage: who is there, how full, and which way the flows take."""
    network, last = trial.network, trial.last
    columns = _columns(trial)
    tallest = max(map(len, columns))
    size = (max(8.0, 1.25 * len(columns)), min(14.0, max(4.2, 0.55 * tallest + 1.4)))
    figure = _figure(size)
    axes = figure.add_subplot()
    places = _places(columns)
    _draw_flows(figure, axes, trial, places)
    _draw_nodes(axes, trial, places, tallest)
    for x in range(len(columns)):
        head = "data" if x in (0, len(columns) - 1) else f"stage {x}"
        axes.annotate(head, (x, 1.0), ha="center", va="bottom", color=_INK, fontsize=9)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-1.0, 1.0 + 0.9 / size[1]))
    axes.axis("off")
    axes.set_title(
        f"{network.num_nodes} nodes, {last.worth.flow} of {last.best.flow} flows by "
        f"{trial.policy}: {last.worth.mean_s:.3f} s per path, at best {last.best.mean_s:.3f} s",
        color=_INK,
        fontsize=11,
        loc="left",
    )
    figure.savefig(path, format="png")


def draw_convergence(path: FilePath, trial: Trial) -> None:
    """Write a PNG over the rounds: cost above the optimum, whole flows, messages."""
    figure = _figure((9.0, 6.2))
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.4, 1))
    ticks = [point.tick for point in trial.points]
    _draw_excess(axes[0], trial, ticks)
    axes[1].step(ticks, [p.best.flow for p in trial.points], where="post", color=_FAINT, lw=1.2)
    axes[1].step(ticks, [p.worth.flow for p in trial.points], where="post", color=_COLOURS[2])
    axes[1].set_ylim(bottom=0, top=1.15 * max(p.best.flow for p in trial.points))
    axes[1].set_ylabel("flows")
    axes[2].plot(ticks, [p.messages_per_node for p in trial.points], color=_COLOURS[4], lw=1)
    axes[2].set_ylim(bottom=0)
    axes[2].set(xlabel="round", ylabel="messages\nper node")
    axes[1].annotate("grey: the most that can flow", (0.99, 0.08), xycoords="axes fraction",
                     ha="right", color=_FAINT, fontsize=8)  # fmt: skip
    for ax in axes:
        _make_plain(ax)
        for change in trial.changes:
            ax.axvline(change.tick, color=_COLOURS[7], lw=0.9, alpha=0.55, ls=":")
    for change in trial.changes if len(trial.changes) <= 8 else ():
        axes[0].annotate(f" {change.num_gone} died", (change.tick, 0.97), color=_COLOURS[7],
                         xycoords=("data", "axes fraction"), va="top", fontsize=8)  # fmt: skip
    figure.savefig(path, format="png")


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _make_plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelsize=8)
    axes.grid(axis="y", color=_PALE, lw=0.8)
    axes.set_axisbelow(True)
    axes.yaxis.label.set_color(_INK)


# --- the network ---------------------------------------------------------------------------


def _columns(trial: Trial) -> list[list[int]]:
    """Return the nodes by column, in an order in which few lines cross."""
    network = trial.network
    columns = [list(network.holders_of(s)) for s in range(network.num_stages + 1)]
    columns.append(list(columns[0]))
    heights = _heights(columns)
    for sweep in range(_SWEEPS):
        order = range(1, len(columns) - 1)
        for x in order if sweep % 2 == 0 else reversed(order):
            pulls: dict[int, list[float]] = {}
            for route in trial.routes:
                ends = (route.data_node, *route.holders, route.data_node)
                pulls.setdefault(ends[x], []).extend(
                    (heights[x - 1][ends[x - 1]], heights[x + 1][ends[x + 1]])
                )
            columns[x].sort(key=lambda i: _mean(pulls.get(i, [heights[x][i]])))
            heights = _heights(columns)
    return columns


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _heights(columns: Sequence[Sequence[int]]) -> list[dict[int, float]]:
    """Spread each column evenly over -1..1; one node alone stands in the middle."""
    return [{i: 1 - (2 * k + 1) / len(column) for k, i in enumerate(column)} for column in columns]


def _places(columns: Sequence[Sequence[int]]) -> list[dict[int, Place]]:
    return [
        {i: (float(x), y) for i, y in heights.items()}
        for x, heights in enumerate(_heights(columns))
    ]


def _draw_flows(figure: Figure, axes: Axes, trial: Trial, places: list[dict[int, Place]]) -> None:
    """Draw a band for each link in use: a colour per data node, or by cost if there is one."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    network = trial.network
    bands: Counter[tuple[int, int, int, int]] = Counter()
    for route in trial.routes:
        bands.update((route.data_node, x, i, j) for x, (i, j) in enumerate(route.hops))
    costs = [float(network.cost_s[i, j]) for _, _, i, j in bands] or [0.0]
    scale = Normalize(min(costs), max(costs))
    colours = colormaps["viridis_r"]
    is_alone = len(network.data_nodes) == 1
    for (source, x, i, j), count in sorted(bands.items()):
        cost = float(network.cost_s[i, j])
        order = network.data_nodes.index(source)
        colour = colours(scale(cost)) if is_alone else _COLOURS[order % len(_COLOURS)]
        start, end = places[x][i], places[x + 1][j]
        # Several data nodes share links: their bands lie beside each other.
        lift = 0.0 if is_alone else 0.012 * (order - (len(network.data_nodes) - 1) / 2)
        _band(axes, start, end, lift, width=0.9 + 1.1 * count, colour=colour)
    if is_alone and trial.routes:
        bar = figure.colorbar(
            ScalarMappable(scale, colours), ax=axes, shrink=0.5, aspect=30, pad=0.01
        )
        bar.set_label("cost of a link in s", color=_INK, fontsize=9)
        bar.outline.set_visible(False)
        bar.ax.tick_params(colors=_INK, labelsize=8)


def _band(axes: Axes, start: Place, end: Place, lift: float, *, width: float, colour: Any) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    (x0, y0), (x1, y1) = start, end
    points = [(x0, y0 + lift), (x0 + 0.45, y0 + lift), (x1 - 0.45, y1 + lift), (x1, y1 + lift)]
    curve = Path(points, [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    axes.add_patch(
        PathPatch(curve, fill=False, lw=width, ec=colour, alpha=0.8, capstyle="butt", zorder=1)
    )


def _draw_nodes(axes: Axes, trial: Trial, places: list[dict[int, Place]], tallest: int) -> None:
    """Draw each node as a disc, as big as what it can carry, filled as far as it is used."""
    network, alive = trial.network, set(trial.alive)
    used: Counter[int] = Counter()
    for route in trial.routes:
        used.update((route.data_node, *route.holders))
    unit = min(70.0, 900.0 / tallest) / max(1, *network.capacities) * 4
    for x, column in enumerate(places):
        for i, (_, y) in column.items():
            if network.stages[i] == 0:
                _draw_data_node(axes, network, i, (x, y))
                continue
            if i not in alive:
                axes.scatter(x, y, s=30, marker="x", color=_COLOURS[7], lw=1.2, zorder=3)
                continue
            room = max(network.capacities[i], 0.3)
            axes.scatter(x, y, s=unit * room, color="white", ec=_INK, lw=0.9, zorder=2)
            if used[i]:
                axes.scatter(x, y, s=unit * used[i], color=_INK, lw=0, zorder=3)
            if tallest <= _LABELLED:
                _label(axes, network, i, (x, y))


def _draw_data_node(axes: Axes, network: RoutingNetwork, index: int, place: Place) -> None:
    order = network.data_nodes.index(index)
    colour = _INK if len(network.data_nodes) == 1 else _COLOURS[order % len(_COLOURS)]
    axes.scatter(*place, s=190, marker="s", color=colour, lw=0, zorder=3)
    _label(axes, network, index, place)


def _label(axes: Axes, network: RoutingNetwork, index: int, place: Place) -> None:
    region = network.regions[index] if network.regions else ""
    text = f"{network.names[index]} {region}".rstrip()
    box = {"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75}
    axes.annotate(text, place, xytext=(0, -13), textcoords="offset points", ha="center", va="top",
                  fontsize=7, color=_INK, zorder=4, bbox=box)  # fmt: skip


# --- how it settled ------------------------------------------------------------------------


def _draw_excess(axes: Axes, trial: Trial, ticks: Sequence[int]) -> None:
    """Draw how far mean path costs are above the optimum, in percent on a logarithmic axis."""
    from matplotlib.ticker import FuncFormatter

    whole = [max(_FLOOR_PERCENT, 100 * (p.ratio - 1)) if p.is_full else nan for p in trial.points]
    # A few cheap flows tell nothing about the cost of all.
    partly = [
        max(_FLOOR_PERCENT, 100 * (p.ratio - 1)) if 2 * p.worth.flow >= p.best.flow else nan
        for p in trial.points
    ]
    axes.plot(ticks, partly, color=_FAINT, lw=0.9, ls=":", label="some flows are missing")
    axes.plot(ticks, whole, color=_COLOURS[0], lw=1.6, label=f"{trial.policy}, all that can flow")
    best = trial.last.best
    if trial.greedy.flow == best.flow and best.sum_s:
        greedy = max(_FLOOR_PERCENT, 100 * (trial.greedy.mean_s / best.mean_s - 1))
        axes.axhline(greedy, color=_COLOURS[1], lw=1.2, ls="--", label="greedy, knowing all")
    axes.set_yscale("log")
    axes.set_ylim(bottom=_FLOOR_PERCENT * 0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.set_ylabel("cost above the optimum")
    axes.set_title(
        f"{trial.policy} on {trial.network.num_nodes} nodes: {100 * (trial.last.ratio - 1):.2f} % "
        f"above the optimum in the end",
        color=_INK, fontsize=11, loc="left",
    )  # fmt: skip
    axes.legend(framealpha=0.9, edgecolor="none", fontsize=8, labelcolor=_INK, loc="upper right")


def _percent(value: float, _position: object) -> str:
    return f"at most {value:g} %" if value <= _FLOOR_PERCENT else f"{value:g} %"
