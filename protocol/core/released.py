"""The tries that a data node has taken back: what still comes of them is refused."""

from __future__ import annotations

from protocol.keys import PeerId
from protocol.messages import WorkId

# Of one data node. A forgotten one costs a place until the step ends, if it comes so late.
MOST_REMEMBERED = 1024


class Released:
    """The last ``MOST_REMEMBERED`` tries of each data node of the step that were released."""

    def __init__(self) -> None:
        self._of: dict[PeerId, dict[WorkId, None]] = {}

    def __contains__(self, work_id: WorkId) -> bool:
        return work_id in self._of.get(work_id.data_node, ())

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def add(self, work_id: WorkId) -> None:
        """Remember a try, and forget the oldest one if there are too many."""
        known = self._of.setdefault(work_id.data_node, {})
        known[work_id] = None
        if len(known) > MOST_REMEMBERED:
            del known[next(iter(known))]
