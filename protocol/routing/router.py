"""The Router interface: where a node sends a microbatch next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from protocol.keys import PeerId
from protocol.messages import Decision


class Router(Protocol):
    """Chooses the next holder; told what became of each choice. Pure: times are arguments.

    ``data_node`` is the microbatch's own: the flow that it belongs to ends there.
    """

    def choose(
        self,
        stage: int,
        avoid: Collection[PeerId],
        now: float,
        *,
        data_node: PeerId,
        previous: PeerId | None = None,
    ) -> PeerId | None:
        """Return the holder of ``stage`` to send to, or None if all are to be avoided.

        ``previous`` is who sent it here, None at its data node.
        """
        ...

    def sent(self, peer: PeerId, now: float, *, data_node: PeerId) -> None:
        """A microbatch went to ``peer``."""
        ...

    def returned(self, peer: PeerId, seconds: float, now: float, *, data_node: PeerId) -> None:
        """Its gradient came back after ``seconds``."""
        ...

    def lost(self, peer: PeerId, now: float, *, data_node: PeerId, is_fault: bool) -> None:
        """It will not come back; ``is_fault`` if the peer is to blame."""
        ...

    def window(self, decision: Decision, now: float) -> int:
        """How many microbatches a data node keeps in flight."""
        ...
