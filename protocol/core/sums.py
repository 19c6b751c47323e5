"""A holder's weight gradients: pending until the word comes, then in the sums, once."""

from __future__ import annotations

import trio

from protocol.core.context import Context
from protocol.core.passage import Passage
from protocol.messages import WorkId
from protocol.step.ledger import SlotId, StepLedger


class Sums:
    """The gradients of one step at a holder; ledger and stage change together, in one job.

    ``redriven`` has the slots that the closing waits for.
    """

    def __init__(self, ctx: Context, ledger: StepLedger) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._pending: set[WorkId] = set()
        self.redriven: dict[SlotId, trio.Event] = {}

    def has_pending(self, work_id: WorkId) -> bool:
        """Whether a weight gradient waits for the word that it counts."""
        return work_id in self._pending

    def pend(self, work_id: WorkId) -> None:
        """The stage keeps a weight gradient apart."""
        self._pending.add(work_id)

    def drop(self, work_id: WorkId) -> None:
        """It will not count."""
        self._pending.discard(work_id)

    async def commit(self, work_id: WorkId) -> bool:
        """Move a pending gradient into the sums; False if it is gone or its slot is there."""
        return await self._ctx.compute("commit", lambda: self._commit_once(work_id))

    def _commit_once(self, work_id: WorkId) -> bool:
        if work_id not in self._pending or not self._ledger.has_room_for(work_id):
            return False
        self._ctx.state.commit(work_id, self._ctx.group_of(work_id))
        self._ledger.commit(work_id)
        self._pending.discard(work_id)
        return True

    async def take_redriven(self, work: Passage) -> None:
        """Only the holder that lost this gradient accumulates it; the others just pass it on."""
        ctx, work_id = self._ctx, work.id
        slot = (work_id.data_node, work_id.slot)
        if ctx.stage == work.target_stage and work.target == ctx.me:
            await ctx.compute("commit", lambda: self._commit_redriven(work_id, slot))
            if slot in self.redriven:
                self.redriven[slot].set()
        else:
            await ctx.compute("commit", lambda: ctx.state.discard(work_id))

    def _commit_redriven(self, work_id: WorkId, slot: SlotId) -> None:
        """Only while the closing waits for it, or two holders might have it."""
        if slot in self.redriven and self._ledger.has_room_for(work_id):
            self._ctx.state.commit(work_id, self._ctx.group_of(work_id))
            self._ledger.commit(work_id)
        else:
            self._ctx.state.discard(work_id)
