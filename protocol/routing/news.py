"""Who is still to be told something: a few at a time, so that a popular node does not flood.

Thousands may have one node in view. News that are due to more than ``settings.audience`` of them
wait for the next occasion, and by then the newest is told, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Generic, TypeVar

from protocol.keys import PeerId

Topic = TypeVar("Topic")


class News(Generic[Topic]):
    """What each peer has not been told yet; who has waited longest comes first."""

    def __init__(self) -> None:
        self._due: dict[PeerId, set[Topic]] = {}
        self._whole: set[PeerId] = set()

    def __bool__(self) -> bool:
        return bool(self._due)

    def add(
        self, peers: Iterable[PeerId], topics: Collection[Topic], *, is_all: bool = False
    ) -> None:
        """These peers are to hear of these topics; ``is_all``: and that there are no others."""
        for peer in peers:
            self._due.setdefault(peer, set()).update(topics)
            if is_all:
                self._whole.add(peer)

    def told(self, peer: PeerId) -> None:
        """``peer`` knows all there is."""
        self._due.pop(peer, None)
        self._whole.discard(peer)

    def take(self, present: Collection[PeerId], most: int) -> list[tuple[PeerId, bool, set[Topic]]]:
        """The next ``most`` peers, whether it is all, and the topics; who left hears nothing."""
        for gone in [peer for peer in self._due if peer not in present]:
            self.told(gone)
        taken = [(p, p in self._whole, self._due[p]) for p in islice(self._due, most)]
        for peer, _, _ in taken:
            self.told(peer)
        return taken
