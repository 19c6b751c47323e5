"""The few peers that a node looks at: nearest ones and random ones of the stages beside it.

With random peers alone the flow ends some per cent above the optimum, with nearest ones alone
parts of the network never hear of each other (spec 1.7).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from protocol.keys import PeerId
from protocol.routing.settings import RoutingSettings


@dataclass(slots=True)
class Seen:
    """What is known of a peer in view."""

    stage: int
    compute_s: float
    link_s: float  # d_ij of spec 1.1
    offers: dict[PeerId, list[float]] = field(default_factory=dict)
    introduced: int = -(10**6)


class View:
    """Chooses peers of the next and the own stage, and remembers what they said."""

    def __init__(self, settings: RoutingSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng
        self.known: dict[PeerId, int] = {}
        self.next: dict[PeerId, Seen] = {}
        self.same: dict[PeerId, Seen] = {}
        self.subscribers: dict[PeerId, int] = {}  # who wants news, and when it last said so
        self.compute_of: dict[PeerId, float] = {}

    def choose(
        self, stages: Mapping[PeerId, int], stage: int, link_s: Callable[[PeerId], float]
    ) -> None:
        """Note all known peers, and draw some of the own stage."""
        self.known = dict(stages)
        s = self._settings
        chosen = self._draw(stage, s.num_same // 2, s.num_same - s.num_same // 2, link_s, ())
        self.same = {p: self.same.get(p) or self._new(p, link_s) for p in chosen}
        self.subscribers = {p: t for p, t in self.subscribers.items() if p in self.known}

    def look_ahead(
        self,
        stage: int,
        num_stages: int,
        link_s: Callable[[PeerId], float],
        keep: Collection[PeerId],
        num_wanted: int,
    ) -> None:
        """Draw the peers of the stage after ``stage``; those in ``keep`` stay.

        A data node may need more holders than others look at, ``num_wanted`` more: it draws as many
        as it can introduce itself to until it draws again.
        """
        after = (stage + 1) % (num_stages + 1)
        s = self._settings
        num_random = max(s.num_random, min(num_wanted, s.audience * s.search_ticks))
        chosen = self._draw(after, s.num_nearest, num_random, link_s, keep)
        self.next = {p: self.next.get(p) or self._new(p, link_s) for p in chosen}

    def _new(self, peer: PeerId, link_s: Callable[[PeerId], float]) -> Seen:
        return Seen(self.known[peer], self.compute_of.get(peer, 0.0), link_s(peer))

    def _draw(
        self,
        stage: int,
        num_nearest: int,
        num_random: int,
        link_s: Callable[[PeerId], float],
        keep: Collection[PeerId],
    ) -> list[PeerId]:
        """All peers if they are few; else those in use, the nearest, and some at random."""
        peers = sorted(p for p, k in self.known.items() if k == stage)
        if len(peers) <= num_nearest + num_random:
            return peers
        peers.sort(key=link_s)
        chosen = dict.fromkeys(p for p in peers if p in keep)
        chosen |= dict.fromkeys(peers[:num_nearest])
        rest = [p for p in peers if p not in chosen]
        return [*chosen, *self._rng.sample(rest, min(num_random, len(rest)))]

    def forget(self, peer: PeerId) -> None:
        """``peer`` is gone."""
        for table in (self.known, self.next, self.same, self.subscribers, self.compute_of):
            table.pop(peer, None)
