"""How fast large frames cross a lane, from the acknowledgements of those that were sent."""

from __future__ import annotations

LEAST_BYTES = 32 * 1024  # smaller frames tell about the delay and nothing else
FASTEST_BYTES_S = 1e10
_KEEP = 0.8


class Throughput:
    """A mean over the last transfers; the time that a frame waited behind others is left out."""

    def __init__(self) -> None:
        self._s_per_byte: float | None = None
        self._last_at = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """What one frame gets, or None before one of some size was acknowledged."""
        return None if self._s_per_byte is None else 1 / self._s_per_byte

    def acknowledged(self, num_bytes: int, began_at: float, now: float, rtt_s: float) -> None:
        """Frames whose writing began at ``began_at`` were acknowledged together.

        Frames on the way together are told apart by their acknowledgements; the first one of them
        waited for a round trip too.
        """
        is_behind = self._last_at > began_at
        took_s = now - self._last_at if is_behind else now - began_at - rtt_s
        self._last_at = now
        if num_bytes < LEAST_BYTES:
            return
        sample = max(took_s / num_bytes, 1 / FASTEST_BYTES_S)
        before = sample if self._s_per_byte is None else self._s_per_byte
        self._s_per_byte = _KEEP * before + (1 - _KEEP) * sample
