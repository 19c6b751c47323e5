"""The law: what a swarm computed equals what one computer would have computed."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from reference.loop import Outcome

LOSS_TOLERANCE = 1e-6
WEIGHT_TOLERANCE = 5e-5


class LawBroken(AssertionError):
    """The swarm's numbers are not those of one computer."""


def relative_norm(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """|ours - theirs| / |theirs|, in double precision."""
    difference = (ours.double() - theirs.double()).norm()
    return float(difference / theirs.double().norm())


def largest_errors(swarm: Outcome, reference: Outcome) -> tuple[float, float]:
    """The largest relative error of any step's loss, and of any tensor's weights."""
    losses = [abs(swarm.losses[step] - loss) / abs(loss) for step, loss in reference.losses.items()]
    weights = [
        relative_norm(swarm.weights[name], weight) for name, weight in reference.weights.items()
    ]
    # max() would let a NaN pass, depending on where it stands
    return _worst(losses), _worst(weights)


def assert_equal_outcomes(swarm: Outcome, reference: Outcome) -> None:
    """Raise LawBroken unless all steps, losses and weights agree within the law's tolerances."""
    _assert_same_keys("steps", swarm.losses, reference.losses)
    _assert_same_keys("tensors", swarm.weights, reference.weights)
    loss, weight = largest_errors(swarm, reference)
    if not (loss <= LOSS_TOLERANCE and weight <= WEIGHT_TOLERANCE):
        raise LawBroken(
            f"losses differ by {loss:.1e} (at most {LOSS_TOLERANCE:.0e}), "
            f"weights by {weight:.1e} (at most {WEIGHT_TOLERANCE:.0e})"
        )


def _assert_same_keys(what: str, swarm: Mapping, reference: Mapping) -> None:
    if swarm.keys() != reference.keys():
        raise LawBroken(f"different {what}: {sorted(swarm.keys() ^ reference.keys(), key=str)}")


def _worst(errors: list[float]) -> float:
    return math.inf if any(math.isnan(error) for error in errors) else max(errors)
