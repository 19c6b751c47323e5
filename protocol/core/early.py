"""Messages that came before this node took the decision that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from protocol.ports import Envelope

KEPT = 256
KEPT_BYTES = 256 * 2**20


class EarlyMessages:
    """A bounded queue: the oldest go first when messages or their tensors become too many."""

    def __init__(self) -> None:
        self._waiting: deque[Envelope] = deque()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def keep(self, envelope: Envelope) -> None:
        """Keep a message for later."""
        self._waiting.append(envelope)
        self._num_bytes += _size(envelope)
        while len(self._waiting) > KEPT or (self._num_bytes > KEPT_BYTES and len(self) > 1):
            self._num_bytes -= _size(self._waiting.popleft())

    def replay(self, take: Callable[[Envelope], None]) -> None:
        """Hand on all that waits, in the order of arrival; ``take`` may keep some again."""
        waiting = self._waiting
        self.clear()
        for envelope in waiting:
            take(envelope)

    def clear(self) -> None:
        """Forget all that waits."""
        self._waiting, self._num_bytes = deque(), 0


def _size(envelope: Envelope) -> int:
    return sum(tensor.nbytes for tensor in envelope.tensors)
