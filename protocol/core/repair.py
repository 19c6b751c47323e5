"""Recomputing what died with a holder: its weight gradient of a committed microbatch.

The neighbours on the path keep what they sent (activation from below, gradient from above); with
both, one stage is run again. If a neighbour is gone too, the data node drives the microbatch once
more to this holder, and only this holder accumulates (architecture section 4, point 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from protocol.core.context import Context
from protocol.core.data_flow import DataFlow
from protocol.core.holder_flow import HolderFlow
from protocol.errors import NonFinite, PeerTimeout, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import Boundary, Decision, Entry, FetchBoundary, Redrive, WorkId
from protocol.ports import Envelope, Tensor
from protocol.step.ledger import SlotId, StepLedger

_Key = tuple[WorkId, str]


class Repair:
    """One member's recomputations in one step."""

    def __init__(self, ctx: Context, ledger: StepLedger, flow: HolderFlow | DataFlow) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._flow = flow
        self._waiting: dict[_Key, tuple[PeerId, trio.Event]] = {}
        self._arrived: dict[_Key, Tensor | None] = {}

    def on_boundary(self, envelope: Envelope) -> None:
        """Take the answer of the neighbour that was asked."""
        message = envelope.message
        assert isinstance(message, Boundary)
        key = (message.work, message.direction)
        peer, event = self._waiting.get(key, (None, None))
        if event is not None and peer == envelope.sender:
            self._arrived[key] = envelope.tensors[0] if envelope.tensors else None
            event.set()

    async def recompute(self, slot: SlotId, entry: Entry, decision: Decision) -> None:
        """Bring one missing microbatch into my sums; raise PeerTimeout if it cannot be had."""
        assert isinstance(self._flow, HolderFlow), "a data node never lacks its own microbatches"
        work = WorkId(decision.step, slot[0], slot[1], entry.attempt)
        if not await self._recompute_between(work, entry.path, decision):
            await self._redrive(work, decision)
        self._ctx.observer.count("microbatches_recomputed")

    async def _recompute_between(
        self, work: WorkId, path: Sequence[PeerId], decision: Decision
    ) -> bool:
        """Run this stage again on what the neighbours kept; False if they have nothing usable."""
        stage, ring = self._ctx.stage, (work.data_node, *path, work.data_node)
        h_BTW = await self._fetch(work, "activation", ring[stage - 1], decision)
        g_BTW = h_BTW if h_BTW is None else await self._fetch(
            work, "gradient", ring[stage + 1], decision
        )  # fmt: skip
        if h_BTW is None or g_BTW is None:
            return False
        try:
            await self._ctx.compute("backward", lambda: self._run(work, h_BTW, g_BTW))
        except (NonFinite, ProtocolViolation) as error:
            self._ctx.observer.count("errors", code=error.code)
            return False
        return True

    def _run(self, work: WorkId, h_BTW: Tensor, g_BTW: Tensor) -> None:
        """Forward, backward and commit in one job, so that sums and ledger never disagree."""
        if not self._ledger.has_room_for(work):
            return
        key = ("recompute", work)
        blocks = self._ctx.blocks
        try:
            blocks.forward(key, h_BTW, keep=True)
            blocks.backward(key, g_BTW)
            blocks.commit(key, self._ctx.group_of(work))
        finally:
            blocks.discard(key)
        self._ledger.commit(work)

    async def _fetch(
        self, work: WorkId, direction: str, peer: PeerId, decision: Decision
    ) -> Tensor | None:
        """Return the neighbour's tensor, or None if it is gone or no longer has it."""
        if peer not in decision.members or peer == self._ctx.me:
            return None
        key, arrived = (work, direction), trio.Event()
        self._waiting[key] = peer, arrived
        message = FetchBoundary.model_validate(
            {**work._asdict(), "direction": direction, "stage": self._ctx.stage}
        )
        try:
            if await self._ctx.try_send(peer, message):
                with trio.move_on_after(self._ctx.deadlines.request_s):
                    await arrived.wait()
            return self._arrived.pop(key, None)
        finally:
            del self._waiting[key]

    async def _redrive(self, work: WorkId, decision: Decision) -> None:
        assert isinstance(self._flow, HolderFlow)
        slot = (work.data_node, work.slot)
        message = Redrive(**work._asdict(), stage=self._ctx.stage)
        arrived = self._flow.sums.redriven[slot] = trio.Event()
        try:
            with trio.move_on_after(self._ctx.deadlines.step_stall_s):
                while not arrived.is_set():
                    await self._ctx.try_send(work.data_node, message)
                    with trio.move_on_after(self._ctx.deadlines.request_s):
                        await arrived.wait()
                return
            raise PeerTimeout(f"{work.data_node} did not drive slot {work.slot} again")
        finally:
            self._flow.sums.redriven.pop(slot, None)
