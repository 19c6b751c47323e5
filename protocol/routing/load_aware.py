"""A simple choice: the holder where the microbatch should be done first.

What the flow router falls back on, and what it knows of queues and faults.

Score: (outstanding + 1) x time per microbatch + round trip. A peer that fails fast must not look
fast (nor empty), so a fault bars it for a while that doubles with each fault in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from protocol.keys import PeerId
from protocol.messages import Decision

BAR_S = 1.0
MOST_DOUBLINGS = 5
SLOWEST = 4.0  # a peer counts as at most this much slower: one slow reply must not end its work
EMA_KEEP = 0.6  # reply time: 0.6 old + 0.4 new (GWTF spec 1.4)


@dataclass(slots=True)
class _Peer:
    outstanding: int = 0
    seconds: float | None = None
    faults: int = 0
    barred_until: float = 0.0
    num_sent: int = 0


class LoadAwareRouter:
    """Capacity- and latency-aware choice of the next holder."""

    def __init__(self, rtt_s: Callable[[PeerId], float | None]) -> None:
        self._rtt_s = rtt_s
        self._roster: tuple[tuple[PeerId, ...], ...] = ()
        self._step = -1
        self._peers: dict[PeerId, _Peer] = {}

    def on_decision(self, decision: Decision) -> None:
        """Forget peers that are not in the roster, and what was outstanding in past steps."""
        self._roster = decision.roster
        members = set(decision.members)
        self._peers = {p: s for p, s in self._peers.items() if p in members}
        if decision.step != self._step:
            self._step = decision.step
            for state in self._peers.values():
                state.outstanding = state.num_sent = 0

    def choose(self, stage: int, avoid: Collection[PeerId], now: float) -> PeerId | None:
        """Return the holder with the least expected time, or None."""
        holders = [p for p in self._roster[stage] if p not in avoid]
        free = [p for p in holders if self._peer(p).barred_until <= now]
        return min(free or holders, key=self._score, default=None)

    def wait_s(self, peer: PeerId) -> float:
        """When a microbatch that is sent now should be back, with what waits before it."""
        return self._score(peer)[0]

    def is_barred(self, peer: PeerId, now: float) -> bool:
        """Whether it failed a moment ago."""
        return self._peer(peer).barred_until > now

    def num_faults(self, peer: PeerId) -> int:
        """Faults in a row."""
        return self._peer(peer).faults

    def sent(self, peer: PeerId, now: float) -> None:
        """A microbatch went to ``peer``."""
        state = self._peer(peer)
        state.outstanding += 1
        state.num_sent += 1

    def returned(self, peer: PeerId, seconds: float, now: float) -> None:
        """Its gradient came back after ``seconds``."""
        state = self._peer(peer)
        share = seconds / max(1, state.outstanding)
        state.seconds = (
            share if state.seconds is None else EMA_KEEP * state.seconds + (1 - EMA_KEEP) * share
        )
        state.outstanding = max(0, state.outstanding - 1)
        state.faults = 0

    def lost(self, peer: PeerId, now: float, *, is_fault: bool) -> None:
        """It will not come back."""
        state = self._peer(peer)
        state.outstanding = max(0, state.outstanding - 1)
        if is_fault:
            state.faults += 1
            state.barred_until = now + BAR_S * 2 ** min(state.faults, MOST_DOUBLINGS)

    def _peer(self, peer: PeerId) -> _Peer:
        return self._peers.setdefault(peer, _Peer())

    def _score(self, peer: PeerId) -> tuple[float, int, PeerId]:
        state = self._peer(peer)
        known = [s.seconds for s in self._peers.values() if s.seconds is not None]
        best = min(known, default=0.0)
        seconds = best if state.seconds is None else min(state.seconds, SLOWEST * best)
        wait = (state.outstanding + 1) * max(seconds, 1e-3) + (self._rtt_s(peer) or 0.0)
        return wait, state.num_sent, peer
