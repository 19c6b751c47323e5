"""Whose turn it is to be sent a state, and how fast: few at a time, in the order of their coming.

Whoever is served at all is served quickly: with many newcomers over few donors, sending to all of
them at once would give each so little that none has the state before the step is over. Those who
have it are donors in the next step.
"""

from __future__ import annotations

import trio

from protocol.keys import PeerId


class Turns:
    """At most ``num_at_once`` peers are served; who falls silent for ``idle_s`` loses its place."""

    def __init__(self, num_at_once: int, idle_s: float) -> None:
        self._num_at_once, self._idle_s = num_at_once, idle_s
        self._guests: dict[PeerId, float] = {}
        self._waiting: dict[PeerId, float] = {}

    def admits(self, peer: PeerId, now: float) -> bool:
        """Whether a peer that asks is served now; else its place in the queue is kept."""
        self._forget_silent(now)
        if peer not in self._guests:
            self._waiting[peer] = now
            free = self._num_at_once - len(self._guests)
            if peer not in list(self._waiting)[: max(0, free)]:
                return False
            del self._waiting[peer]
        self._guests[peer] = now
        return True

    def is_at_work(self, peer: PeerId, now: float) -> None:
        """A peer that is served took something."""
        if peer in self._guests:
            self._guests[peer] = now

    def end(self, peer: PeerId) -> None:
        """A peer has all that it asked for."""
        self._guests.pop(peer, None)

    def _forget_silent(self, now: float) -> None:
        for peers in (self._guests, self._waiting):
            for peer in [p for p, seen_at in peers.items() if now - seen_at > self._idle_s]:
                del peers[peer]


class Pace:
    """Spreads what is sent over time; ``bytes_per_s`` None sets no limit."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def wait(self, num_bytes: int) -> None:
        """Return when so many bytes may be sent."""
        if self._bytes_per_s is None:
            return
        start = max(trio.current_time(), self._free_at)
        self._free_at = start + num_bytes / self._bytes_per_s
        await trio.sleep_until(start)

    def num_at_once(self, most: int, chunk_bytes: int, limit_s: float) -> int:
        """How many peers can be sent chunks in turn so that each has its own within a limit."""
        if self._bytes_per_s is None:
            return most
        return max(1, min(most, int(limit_s * self._bytes_per_s / chunk_bytes)))
