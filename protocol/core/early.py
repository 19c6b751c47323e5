"""Messages that came before this node took the decision that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge

from protocol.keys import PeerId
from protocol.ports import Envelope

KEPT = 1024
KEPT_OF_ONE = 64
KEPT_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Waiting:
    """What waits of one sender, each with its number of arrival."""

    items: deque[tuple[int, Envelope]] = field(default_factory=deque)
    num_bytes: int = 0


class EarlyMessages:
    """Bounded in number and bytes, for each sender and in all.

    Whoever sends too much loses its own oldest; when all together is too much, the one that takes
    most room does.
    """

    def __init__(self) -> None:
        self._of: dict[PeerId, _Waiting] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return sum(len(waiting.items) for waiting in self._of.values())

    def keep(self, envelope: Envelope) -> None:
        """Keep a message for later."""
        mine = self._of.setdefault(envelope.sender, _Waiting())
        self._num_arrived += 1
        mine.items.append((self._num_arrived, envelope))
        mine.num_bytes += _size(envelope)
        while len(mine.items) > KEPT_OF_ONE:
            self._drop_oldest_of(envelope.sender)
        while len(self) > 1 and self._num_bytes > KEPT_BYTES:
            self._drop_oldest_of(max(self._of, key=lambda peer: self._of[peer].num_bytes))
        while len(self) > KEPT:
            self._drop_oldest_of(max(self._of, key=lambda peer: len(self._of[peer].items)))

    def replay(self, take: Callable[[Envelope], None]) -> None:
        """Hand on all that waits, in the order of arrival; ``take`` may keep some again."""
        waiting = [of.items for of in self._of.values()]
        self.clear()
        for _, envelope in merge(*waiting, key=lambda item: item[0]):
            take(envelope)

    def clear(self) -> None:
        """Forget all that waits."""
        self._of = {}

    @property
    def _num_bytes(self) -> int:
        return sum(waiting.num_bytes for waiting in self._of.values())

    def _drop_oldest_of(self, peer: PeerId) -> None:
        waiting = self._of[peer]
        waiting.num_bytes -= _size(waiting.items.popleft()[1])
        if not waiting.items:
            del self._of[peer]


def _size(envelope: Envelope) -> int:
    return sum(tensor.nbytes for tensor in envelope.tensors)
