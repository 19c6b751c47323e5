"""How much each neighbour counts when a stage is put together from the two.

    W_i = (w_below W_{i-1} + w_above W_{i+1}) / (w_below + w_above)

(arXiv 2506.15461, section 4.2), with w the square of a neighbour's last gradient norm (``sq``), the
norm itself (``l2``) or 1 (``uniform``): who still changes much counts more. The norm is that of the
averaged gradient *before* clipping; clipped, two neighbours above the limit would count the same.
"""

from __future__ import annotations

import math
from typing import Literal

OmegaMode = Literal["sq", "l2", "uniform"]
EPSILON = 1e-12  # below it the norms say nothing
UNIFORM = 0.5


def weight_above(below: float | None, above: float | None, mode: OmegaMode = "sq") -> float:
    """Return w_above / (w_below + w_above) for two gradient norms, in [0, 1].

    One half if a norm is unknown (None), not finite or negative, or if both are next to nothing.
    """
    if mode == "uniform" or below is None or above is None or min(below, above) < 0:
        return UNIFORM
    first, second = (below, above) if mode == "l2" else (below * below, above * above)
    total = first + second
    # A NaN compares as false with everything.
    if not (math.isfinite(total) and total > EPSILON):
        return UNIFORM
    return second / total
