"""Whose rebuilt state the empty holders of a stage take: one leader's, and one state only.

All of them could compute it, and would come to the same bits from the same neighbours' states. But
they may see different steps of them, and replicas must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.keys import PeerId


class Election:
    """One rebuilding of one stage, among those who say that they serve it and are empty."""

    def __init__(self, claimants: Iterable[PeerId] = ()) -> None:
        self._claimants = set(claimants)
        self._published: str | None = None

    @property
    def leader(self) -> PeerId | None:
        """The least PeerID among the living claimants; None without any."""
        return min(self._claimants, default=None)

    @property
    def published(self) -> str | None:
        """The digest that all holders take; None while nobody has rebuilt the stage."""
        return self._published

    def claim(self, peer: PeerId) -> None:
        """Someone serves the stage and has no state."""
        self._claimants.add(peer)

    def withdraw(self, peer: PeerId) -> None:
        """A claimant is gone: what it published stays, otherwise the next one leads."""
        self._claimants.discard(peer)

    def publish(self, peer: PeerId, digest: str) -> bool:
        """Take a claimant's word for the rebuilt state; return whether it is the state to take.

        The leader's first word counts. A second one with another digest does not, whoever leads by
        then: somebody may work from the first already.
        """
        if self._published is None and peer == self.leader:
            self._published = digest
        return self._published == digest
