"""When a node that drains may go: with the step in flight, or at once if that cannot end."""

from __future__ import annotations

from collections.abc import Collection

from protocol.keys import PeerId
from protocol.messages import Decision


class Leaving:
    """Begun by ``drain``; ended early by an authority's Paused, or by the lack of authorities."""

    def __init__(self, me: PeerId, authorities: Collection[PeerId]) -> None:
        self._me, self._authorities = me, authorities
        self._from: tuple[int, int] = (0, 0)
        self.is_draining = False
        self.is_dismissed = False

    def begin(self, decision: Decision | None) -> None:
        """The owner asks this node to leave, under ``decision``."""
        self.is_draining = True
        self._from = decision.order if decision else (0, 0)

    def dismiss(self) -> bool:
        """The step in flight cannot end; return whether that lets this node go."""
        self.is_dismissed = self.is_draining
        return self.is_dismissed

    def may_go(self, decision: Decision | None, is_member: bool) -> bool:
        """Draining ends with the step in flight, even if nobody is there to take over."""
        if not self.is_draining or self.is_dismissed or not is_member:
            return self.is_draining
        assert decision is not None
        return decision.is_final or decision.step != self._from[0]

    def is_governed(self, connected: Collection[PeerId]) -> bool:
        """Whether enough authorities are there for the step in flight to be ended by them."""
        present = sum(a == self._me or a in connected for a in self._authorities)
        return 2 * present > len(self._authorities)
