"""Numbers that tell whether an average is one: eight random ones after each 1024 of the gradient.

hivemind reports success when a member died on the way: some parts are then the mean over all,
others over the survivors, others still the member's own. Parts are cut without regard to our rows,
but a part that holds any of the gradient holds sentinels, and theirs are another mean unless just
the whole group was averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

import torch

ROW, SENTINELS = 1024, 8
# fp32 means of numbers in 0..1 are this exact for thousands of members; one member less moves the
# mean of N by about 0.3 / N.
_TOLERANCE = 1e-5
_COUNT_TOLERANCE = 0.01


def num_rows(num_gradients: int) -> int:
    """Rows for a gradient and the count behind it."""
    return (num_gradients + 1 + ROW - 1) // ROW


def sentinels_of(nonce: bytes, rows: int) -> torch.Tensor:
    """Return one member's sentinels [rows, 8], a function of what it drew for this try."""
    seed = int.from_bytes(sha256(nonce).digest()[:8], "big") >> 1
    return torch.rand(rows, SENTINELS, generator=torch.Generator().manual_seed(seed))


def pack(gradient: torch.Tensor, num_microbatches: int, nonce: bytes) -> torch.Tensor:
    """Return [rows, 1024 + 8]: gradient, count and padding, and each row's sentinels."""
    rows, length = num_rows(len(gradient)), len(gradient)
    flat = torch.zeros(rows * ROW)
    flat[:length] = gradient
    flat[length] = num_microbatches
    return torch.cat((flat.view(rows, ROW), sentinels_of(nonce, rows)), dim=1)


def is_mean_of(packed: torch.Tensor, nonces: Iterable[bytes]) -> bool:
    """Whether every row is the mean over exactly these members."""
    expected = torch.stack([sentinels_of(nonce, len(packed)) for nonce in nonces]).mean(0)
    return bool(((packed[:, ROW:] - expected).abs() <= _TOLERANCE).all())  # a NaN is not


def unpack(packed: torch.Tensor, length: int, num_members: int) -> tuple[torch.Tensor, int] | None:
    """Return sum and count behind a mean over ``num_members``; None if the count is no number."""
    flat = packed[:, :ROW].flatten()
    count = float(flat[length]) * num_members
    if not abs(count - round(count)) <= _COUNT_TOLERANCE:
        return None
    return flat[:length] * num_members, round(count)
