"""What a node that was started again must not do: work on where it no longer knows what it did.

Its gradient sums and its word about microbatches went with the process. A step that an earlier life
worked in is gone on with only under a later term; a data node's slots only when the whole step has
begun anew, because the sums of others hold what it committed.
"""

from __future__ import annotations

from protocol.keys import PeerId
from protocol.messages import Decision


class PastLife:
    """``last`` is the order of the last decision that an earlier life obeyed, None without one."""

    def __init__(self, me: PeerId, last: tuple[int, int] | None) -> None:
        self._me, self._last = me, last

    def bars(self, decision: Decision) -> bool:
        """Whether a member of this decision has to wait for another one."""
        if self._last is None or decision.is_final:
            return False
        step, term = self._last
        draws = any(share.slots for share in decision.shares if share.data_node == self._me)
        may_have_drawn = draws and decision.step == step and decision.begun <= term
        return decision.term <= term or may_have_drawn
