"""What needs no run of its own: checkpoints and redundant computing, read off the failure-free run.

A swarm that goes back to a checkpoint computes the same steps again, to the bit (drawn by (seed,
step, slot)), so after any number of iterations it stands somewhere on the failure-free curve. One
that computes everything twice stands on it as well, later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# The paper's 500M model on its swarm: seconds of an iteration and of rebuilding a stage.
ITERATION_S, REBUILD_S = 91.3, 30.0
# Assumed: writing a checkpoint stops training as long as fetching one does.
WRITE_S = 30.0
PAPERS_REDUNDANCY = 151.0 / 91.3
Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Course:
    """Held-out loss by iteration and by simulated seconds."""

    by_iteration: Curve
    by_second: Curve


def at(curve: Curve, place: float) -> float:
    """The loss at a place, on the straight line between the two known ones around it."""
    places = [x for x, _ in curve]
    right = min(max(bisect_right(places, place), 1), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[right - 1], curve[right]
    share = min(1.0, max(0.0, (place - x0) / (x1 - x0)))
    return y0 + share * (y1 - y0)


def measured(record: dict[str, Any]) -> Course:
    """The course of a run: each loss of a stage costs the time of rebuilding it."""
    lost = [jump["step"] for jump in record["jumps"]]
    curve = [(float(step), loss) for step, loss in record["curve"]]
    for jump in record["jumps"]:
        curve.append((jump["step"] + 1e-3, jump["after"]))
    curve.sort()
    seconds = [
        (step * ITERATION_S + REBUILD_S * sum(at_step < step for at_step in lost), loss)
        for step, loss in curve
    ]
    return Course(curve, seconds)


def with_checkpoints(
    none: dict[str, Any], lost: Sequence[tuple[int, int]], interval: int
) -> Course:
    """Go back to the last multiple of ``interval`` whenever a stage is lost."""
    curve = [(float(step), loss) for step, loss in none["curve"]]
    lost_at = {step for step, _ in lost}
    progress, written, second = 0, 0, 0.0
    places = [(0.0, 0.0, curve[0][1])]
    for iteration in range(1, none["steps"] + 1):
        progress += 1
        second += ITERATION_S
        if progress % interval == 0 and progress > written:
            written = progress
            second += WRITE_S
        places.append((float(iteration), second, at(curve, progress)))
        if iteration in lost_at:
            progress = written
            second += REBUILD_S
            places.append((iteration + 1e-3, second, at(curve, progress)))
    return Course([(i, y) for i, _, y in places], [(s, y) for _, s, y in places])


def redundant(none: dict[str, Any], cost: float) -> Course:
    """Lose nothing, and pay ``cost`` iterations' time for each."""
    curve = [(float(step), loss) for step, loss in none["curve"]]
    return Course(curve, [(step * ITERATION_S * cost, loss) for step, loss in curve])


def measured_redundancy(records: Sequence[dict[str, Any]]) -> float:
    """Cost of also computing the next stage's forward pass, as a share of processor time."""
    spent = [record["spent_s"] for record in records]
    return 1 + sum(s["forward"] for s in spent) / sum(s["step"] for s in spent)


def youngs_interval(failures_per_step: float) -> int:
    """Steps between two checkpoints that lose least: sqrt(2 cost / rate) (Young 1974)."""
    cost_steps = WRITE_S / ITERATION_S
    return max(1, round(math.sqrt(2 * cost_steps / failures_per_step)))
