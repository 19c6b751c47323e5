"""How long other nodes take to answer, and so how long to wait for them. Pure: times are arguments.

The limit for a next hop is 3 x the mean reply time + the time that delivery takes (GWTF spec 1.4),
doubled each time that it was missed in vain, between two bounds of the table. A limit that was
too short is no disaster: whoever answers late is believed again, and its time raises the mean.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from protocol.deadlines import Deadlines
from protocol.keys import PeerId

Direction = Literal["forward", "backward"]
EMA_KEEP = 0.6
MOST_DOUBLINGS = 5


@dataclass(slots=True)
class Mean:
    """An exponential mean of seconds, and how often a limit from it was missed in a row."""

    seconds: float | None = None
    doublings: int = 0

    def add(self, seconds: float) -> None:
        """One more measurement."""
        old = seconds if self.seconds is None else self.seconds
        self.seconds = EMA_KEEP * old + (1 - EMA_KEEP) * seconds
        self.doublings = 0

    def missed(self) -> None:
        """A limit passed without an answer."""
        self.doublings = min(self.doublings + 1, MOST_DOUBLINGS)

    def limit_s(self, factor: float, extra_s: float, least_s: float, most_s: float) -> float:
        """The limit; ``most_s`` while nothing is known."""
        if self.seconds is None:
            return most_s
        seconds = max(least_s, factor * self.seconds + extra_s)
        return min(most_s, seconds * float(2**self.doublings))


@dataclass(slots=True)
class ReplyTimes:
    """What one node measured of its neighbours and of whole flows, over all steps."""

    deadlines: Deadlines
    _replies: dict[tuple[PeerId, Direction], Mean] = field(default_factory=dict)
    _deliveries: dict[PeerId, Mean] = field(default_factory=dict)
    _home: Mean = field(default_factory=Mean)
    _round_trip: Mean = field(default_factory=Mean)

    def keep_only(self, peers: Collection[PeerId]) -> None:
        """Forget who is no longer a member."""
        self._replies = {k: m for k, m in self._replies.items() if k[0] in peers}
        self._deliveries = {k: m for k, m in self._deliveries.items() if k in peers}

    # --- a neighbour -----------------------------------------------------------------------

    def hop_limit_s(self, peer: PeerId, direction: Direction) -> float:
        """How long to wait for a neighbour's sign of life, from the sending on."""
        reply = self._replies.setdefault((peer, direction), Mean())
        delivery = self._deliveries.get(peer, Mean()).seconds or 0.0
        least_s, most_s = self.deadlines.hop_floor_s, self.deadlines.hop_s
        return reply.limit_s(3.0, delivery, least_s, most_s)

    def delivered(self, peer: PeerId, seconds: float) -> None:
        """A boundary tensor took so long to a neighbour."""
        self._deliveries.setdefault(peer, Mean()).add(seconds)

    def answered(self, peer: PeerId, direction: Direction, seconds: float) -> None:
        """Its sign of life came after ``seconds``."""
        self._replies.setdefault((peer, direction), Mean()).add(seconds)

    def silent(self, peer: PeerId, direction: Direction) -> None:
        """It did not come in time."""
        self._replies.setdefault((peer, direction), Mean()).missed()

    # --- a whole flow ----------------------------------------------------------------------

    def home_limit_s(self) -> float:
        """When an activation ought to have come through all stages, from the sending on."""
        least_s, most_s = self.deadlines.hop_floor_s, self.deadlines.hop_s
        return self._home.limit_s(2.0, 0.0, least_s, most_s)

    def flow_limit_s(self) -> float:
        """How long a flow may take without news: twice the predicted round trip."""
        least_s, most_s = self.deadlines.flow_floor_s, self.deadlines.flow_s
        return self._round_trip.limit_s(2.0, 0.0, least_s, most_s)

    def came_home(self, seconds: float) -> None:
        """An activation came through all stages."""
        self._home.add(seconds)

    def came_back(self, seconds: float) -> None:
        """A gradient came back to the embedding."""
        self._round_trip.add(seconds)

    def flow_missed(self) -> None:
        """A flow's time passed."""
        self._round_trip.missed()
