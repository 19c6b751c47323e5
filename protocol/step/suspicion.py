"""Whom to leave out when members cannot work with one another.

What at least two say, among them half of the accused one's stage or of all members, is believed.
Any weaker word may be a lie, and is believed once: those who said it are noted for an hour. If
they alone then accuse another member, one of them is left out instead. So a liar costs the swarm
at most one member, and then itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.keys import PeerId
from protocol.messages import Decision

NOTED_S = 3600.0


@dataclass(slots=True)
class Suspicions:
    """The accusations under one term, and weak words that were believed. Times are monotonic."""

    accusers: dict[PeerId, set[PeerId]] = field(default_factory=dict)
    since: float = 0.0
    _noted: dict[PeerId, tuple[PeerId, float]] = field(default_factory=dict)

    def add(self, accuser: PeerId, accused: PeerId, now: float) -> bool:
        """Note an accusation; return whether it is news."""
        if not self.accusers:
            self.since = now
        against = self.accusers.setdefault(accused, set())
        is_news = accuser not in against
        against.add(accuser)
        return is_news

    def clear(self) -> None:
        """A new term began."""
        self.accusers.clear()

    def is_due(self, now: float, grace_s: float) -> bool:
        """Whether there are accusations, and others had time to add theirs."""
        return bool(self.accusers) and now - self.since >= grace_s

    def worst(self, decision: Decision, now: float) -> PeerId:
        """The member to leave out: the most accused, the higher PeerID among equals."""
        self._noted = {p: (q, until) for p, (q, until) in self._noted.items() if until > now}
        accused = max(self.accusers, key=lambda p: (len(self.accusers[p]), p))
        against = self.accusers[accused]
        if accused in against or _is_corroborated(accused, against, decision):
            return accused
        if all(self._noted.get(p, (accused, now))[0] != accused for p in against):
            return max(against)
        for peer in against:
            self._noted.setdefault(peer, (accused, now + NOTED_S))
        return accused


def _is_corroborated(accused: PeerId, against: set[PeerId], decision: Decision) -> bool:
    stage = decision.stage_of(accused)
    groups = [decision.members, decision.roster[stage] if stage is not None else ()]
    return len(against) >= 2 and any(
        2 * len(against & set(group)) >= len(set(group) - {accused}) > 0 for group in groups
    )
