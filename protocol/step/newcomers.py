"""How much time strangers may cost: the rule that limits who is let into a running swarm.

Nothing that a newcomer could show proves that it will work: a state's digest is public, and whoever
asks may fetch the state itself. So what strangers can cost is bounded instead. When a newcomer had
to be left out before it finished one step with the others, no other newcomer is let in for ``REST``
times as long as it was a member. However many identities somebody makes, the swarm loses at most
about 1 / (1 + REST) of its time to them. Who has finished a step before is not a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.keys import PeerId

REST = 10.0
MOST_PROVEN = 4096


@dataclass(slots=True)
class Newcomers:
    """Who was let in and has yet to finish a step, and until when nobody new is. Monotonic."""

    closed_until: float = -math.inf
    _admitted: dict[PeerId, float] = field(default_factory=dict)
    _proven: dict[PeerId, None] = field(default_factory=dict)

    def may_enter(self, peer: PeerId, now: float) -> bool:
        """Whether a node may be let in now."""
        return peer in self._proven or now >= self.closed_until

    def let_in(self, peers: Iterable[PeerId], now: float) -> None:
        """These are members from now on."""
        for peer in peers:
            if peer not in self._proven:
                self._admitted.setdefault(peer, now)

    def finished(self, members: Iterable[PeerId]) -> None:
        """These worked through a step; the ones that did so longest ago are forgotten first."""
        for peer in members:
            self._admitted.pop(peer, None)
            self._proven.pop(peer, None)
            self._proven[peer] = None
        while len(self._proven) > MOST_PROVEN:
            del self._proven[next(iter(self._proven))]

    def left_out(self, peers: Iterable[PeerId], now: float) -> None:
        """These had to leave within a step."""
        for peer in peers:
            since = self._admitted.pop(peer, None)
            if since is not None:
                self.closed_until = max(self.closed_until, now + REST * (now - since))
