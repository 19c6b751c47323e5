"""The Router interface: where a node sends a microbatch next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from protocol.keys import PeerId
from protocol.messages import Decision


class Router(Protocol):
    """Chooses the next holder; told what became of each choice. Pure: times are arguments."""

    def on_decision(self, decision: Decision) -> None:
        """A new roster: forget who is no longer in it."""
        ...

    def choose(self, stage: int, avoid: Collection[PeerId], now: float) -> PeerId | None:
        """Return the holder of ``stage`` to send to, or None if all are to be avoided."""
        ...

    def sent(self, peer: PeerId, now: float) -> None:
        """A microbatch went to ``peer``."""
        ...

    def returned(self, peer: PeerId, seconds: float, now: float) -> None:
        """Its gradient came back after ``seconds``."""
        ...

    def lost(self, peer: PeerId, now: float, *, is_fault: bool) -> None:
        """It will not come back; ``is_fault`` if the peer is to blame."""
        ...
