"""What a sum is made of, in the averaging benchmark."""

from __future__ import annotations

from typing import Any

import torch

SUM_TOLERANCE = 1e-6


def judged(result: torch.Tensor, expected: float) -> dict[str, Any]:
    """Whether a sum is what all members' values make, in every place.

    Each member's values are a constant of its own, so that a result tells what it is made of.
    """
    error = float((result - expected).abs().max()) / expected
    kinds = len(torch.unique(result.round(decimals=3)))
    told = "right" if error < SUM_TOLERANCE else "mixture" if kinds > 1 else "of fewer members"
    return {"result": told, "error": error}
