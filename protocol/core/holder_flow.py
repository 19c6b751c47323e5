"""A holder's part in the flow of microbatches: forward on, gradient back, commit once.

What it sent (activation up, gradient down) it keeps until the step is over: a lost neighbour on the
path is replaced and gets it again, and what died with one is computed again by its stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from protocol.core.context import Context
from protocol.core.handing_on import HandingOn
from protocol.core.passage import Passage, about, branch_losers
from protocol.core.released import Released
from protocol.core.sending_back import SendingBack
from protocol.core.sums import Sums
from protocol.errors import NonFinite, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    Backward,
    Busy,
    Commit,
    Computed,
    Decision,
    Failed,
    FetchBoundary,
    Forward,
    HopLost,
    Resume,
    WorkId,
)
from protocol.ports import Envelope, JobKind
from protocol.step.ledger import StepLedger

T = TypeVar("T")


class HolderFlow:
    """The microbatches of one step at a holder of stages 1..S."""

    def __init__(self, ctx: Context, decision: Decision, ledger: StepLedger) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self.decision = decision
        self._works: dict[WorkId, Passage] = {}
        self._released, self._home = Released(), Released()
        self._ahead = HandingOn(ctx, decision)
        self._back = SendingBack(ctx, decision)
        self.sums = Sums(ctx, ledger)
        self.heard_at: dict[PeerId, float] = {}

    @property
    def num_open(self) -> int:
        """Microbatches in flight or with an uncommitted gradient; redrives have a slot apart."""
        return sum(not w.is_ended and w.purpose != "redrive" for w in self._works.values())

    # --- forward ---------------------------------------------------------------------------

    async def on_forward(self, envelope: Envelope) -> None:
        """Compute this stage and hand the activation on."""
        message, sender = envelope.message, envelope.sender
        assert isinstance(message, Forward)
        if not self._accepts(message, envelope):
            return
        known = self._works.get(message.work)
        if known is not None:
            await self._recognise(known, message, sender)
        elif message.work in self._home and not message.is_repair:
            await self._ctx.try_send(sender, about(Computed, message.work, stage=self._ctx.stage))
        elif not self._knows_both(message, sender) or not self._has_room_for(message):
            await self._ctx.try_send(sender, about(Busy, message.work, stage=self._ctx.stage))
        else:
            await self._begin(message, envelope)

    def _accepts(self, message: Forward, envelope: Envelope) -> bool:
        """Whether the message fits this stage and its own path, and its try is not over."""
        ctx = self._ctx
        previous = message.path[-1] if message.path else message.data_node
        return (
            message.stage == ctx.stage
            and len(message.path) == ctx.stage - 1
            and previous == envelope.sender
            and message.work not in self._released
            and len(envelope.tensors) == 1
            and (message.purpose == "eval" or message.slot < ctx.manifest.training.quota)
        )

    def _knows_both(self, message: Forward, sender: PeerId) -> bool:
        """Whether sender and data node belong to the step, which may be so a moment later."""
        return (
            self.decision.stage_of(sender) == self._ctx.stage - 1
            and message.data_node in self.decision.data_nodes
        )

    def _has_room_for(self, message: Forward) -> bool:
        """One place is kept for what replaces something that was lost."""
        is_new = message.is_first_try and not message.is_repair
        reserve = 1 if is_new and self._ctx.capacity > 1 else 0
        return self.num_open < self._ctx.capacity - reserve

    async def _begin(self, message: Forward, envelope: Envelope) -> None:
        ctx, h_BTW = self._ctx, envelope.tensors[0]
        self.heard_at[message.data_node] = trio.current_time()
        work = Passage(
            message.work, message.purpose, message.target_stage, message.target,
            is_repair=message.is_repair, route=message.route,
            source=envelope.sender, sources={envelope.sender: message.path},
        )  # fmt: skip
        self._works[work.id] = work
        self._gauge_capacity()
        keep = self._needs_backward(work)
        try:
            output = await self._compute(
                work, "forward", lambda: ctx.blocks.forward(work.id, h_BTW, keep=keep)
            )
        except (NonFinite, ProtocolViolation) as error:
            await self._refuse(work, error, envelope.sender)
            return
        await ctx.faults.reach("after_forward", message.step)
        if not work.is_ended:
            work.output = output
            await self._hand_on(work)
        if not keep:
            work.end()

    def _needs_backward(self, work: Passage) -> bool:
        return work.purpose == "train" or (
            work.purpose == "redrive" and self._ctx.stage >= work.target_stage
        )

    async def _compute(self, work: Passage, kind: JobKind, job: Callable[[], T]) -> T | None:
        """Run a job of a try, or none if the try was forgotten before the job's turn came."""
        return await self._ctx.compute(kind, lambda: None if work.is_ended else job())

    async def _hand_on(self, work: Passage) -> None:
        async with trio.open_nursery() as nursery:
            for source in work.sources:
                nursery.start_soon(self._say_computed, work, source)
            nursery.start_soon(self._hand_on_or_fail, work)

    async def _hand_on_or_fail(self, work: Passage) -> None:
        if not await self._ahead.hand_on(work):
            await self._report_failure(work, "no holder of the next stage")

    async def _say_computed(
        self, work: Passage, peer: PeerId, *, is_backward: bool = False
    ) -> None:
        message = about(Computed, work.id, stage=self._ctx.stage, is_backward=is_backward)
        await self._ctx.try_send(peer, message)

    async def _recognise(self, work: Passage, message: Forward, sender: PeerId) -> None:
        """A try that is here already, from a branch that joins it: nothing is computed again."""
        if work.commit is not None:
            await self._ctx.try_send(sender, work.commit)
            return
        is_known = work.source == sender
        self._back.on_source(work, message, sender)
        if work.output is None:
            return  # its sources are answered when it is computed
        await self._say_computed(work, sender)
        if not message.is_repair or work.is_ended:
            return
        if work.gradient is not None:
            await self._send_back(work)
        elif is_known and not work.is_back and not work.is_offering:
            await self._hand_on_anew(work, message)

    async def _hand_on_anew(self, work: Passage, message: Forward) -> None:
        """The stage before lost another branch to this one: those ahead must turn to it, too."""
        work.is_repair, work.route = True, message.route or (work.next,)
        work.taken.clear()
        await self._hand_on_or_fail(work)

    async def on_computed(self, message: Computed, sender: PeerId) -> None:
        """A neighbour on the path lives and has done its part.

        The data node, if another branch came home.
        """
        work = self._works.get(message.work)
        if sender == message.data_node and message.stage == 0:
            self._home.add(message.work)
        elif work is None:
            return
        elif message.is_backward:
            self._back.on_computed(work, sender)
        else:
            self._ahead.on_computed(work, sender)

    async def on_busy(self, message: Busy, sender: PeerId) -> None:
        """The next hop has no room: the activation is offered to another one."""
        work = self._works.get(message.work)
        if work is not None:
            self._ahead.on_busy(work, sender)

    # --- backward --------------------------------------------------------------------------

    async def on_backward(self, envelope: Envelope) -> None:
        """Compute the input's gradient, send it on at once, keep the weights' apart."""
        message, sender = envelope.message, envelope.sender
        assert isinstance(message, Backward)
        work = self._works.get(message.work)
        if work is None or not self._fits(work, message, envelope):
            return
        if work.commit is not None and sender not in work.commit.path:
            await self._ctx.try_send(sender, work.commit)
        elif work.is_back:
            if work.gradient is not None:
                await self._say_computed(work, sender, is_backward=True)
        elif not work.is_ended:
            await self._turn_back(work, message, envelope)

    def _fits(self, work: Passage, message: Backward, envelope: Envelope) -> bool:
        ctx = self._ctx
        return (
            message.stage == ctx.stage
            and envelope.sender in work.offered_at
            and len(message.path) == ctx.num_stages - ctx.stage
            and len(envelope.tensors) == 1
        )

    async def _turn_back(self, work: Passage, message: Backward, envelope: Envelope) -> None:
        ctx, sender, g_BTW = self._ctx, envelope.sender, envelope.tensors[0]
        work.is_back, work.trail = True, message.path
        self.heard_at[message.data_node] = trio.current_time()
        self._ahead.on_gradient(work, sender)
        await ctx.faults.reach("before_backward", message.step)
        try:
            gradient = await self._compute(
                work, "backward", lambda: ctx.blocks.backward(work.id, g_BTW)
            )
        except (NonFinite, ProtocolViolation) as error:
            await self._refuse(work, error, sender)
            return
        if work.is_ended:
            return
        work.gradient = gradient
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(self._say_computed, work, sender, is_backward=True))
            if work.purpose == "train":
                self.sums.pend(work.id)
                await self._send_back(work)
            else:
                await self._end_redrive(work)

    async def _end_redrive(self, work: Passage) -> None:
        """It goes back as far as the holder that lost the gradient, who alone accumulates it."""
        await self.sums.take_redriven(work)
        if self._ctx.stage != work.target_stage:
            await self._send_back(work)
        work.end()

    async def _send_back(self, work: Passage) -> None:
        lost = await self._back.send_back(work)
        if lost is None or self._ctx.stage == 1:
            return
        path = (work.id.data_node, *work.sources[lost])
        await self._report_loss(work, self._ctx.stage - 1, lost, before=path[-2])

    # --- repair of the path ----------------------------------------------------------------

    async def on_peer_down(self, peer: PeerId) -> None:
        """Tell the data nodes of what went through a peer that is gone, or left the roster."""
        async with trio.open_nursery() as nursery:
            for work in list(self._works.values()):
                if self._ahead.lose(work, peer) and self._ctx.stage < self._ctx.num_stages:
                    nursery.start_soon(self._report_next, work, peer)

    async def _report_next(self, work: Passage, peer: PeerId) -> None:
        await self._report_loss(work, self._ctx.stage + 1, peer, before=self._ctx.me)

    async def _report_loss(
        self, work: Passage, stage: int, peer: PeerId, *, before: PeerId
    ) -> None:
        """The data node knows the path beyond it, and says where to resume."""
        message = about(HopLost, work.id, stage=stage, peer=peer, before=before)
        await self._ctx.try_send(work.id.data_node, message)

    async def on_resume(self, message: Resume) -> None:
        """Replace a lost next hop."""
        work = self._works.get(message.work)
        if work is None or message.stage != self._ctx.stage + 1:
            return
        if not await self._ahead.resume(work, message.peer, message.route):
            await self._report_failure(work, "no holder of the next stage")

    async def on_decision(self, decision: Decision) -> None:
        """A new roster: void is what came from a data node that left."""
        self.decision = self._ahead.decision = self._back.decision = decision
        for work in list(self._works.values()):
            if work.id.data_node not in decision.data_nodes:
                await self._forget(work)

    async def on_fetch_boundary(self, message: FetchBoundary, sender: PeerId) -> None:
        """Answer with the tensor that was sent up or down for this microbatch."""
        work = self._works.get(message.work)
        tensor = None
        if work is not None and sender in self.decision.members:
            tensor = work.output if message.direction == "activation" else work.gradient
        await self._ctx.answer_boundary(message, sender, tensor)

    # --- commit and release ----------------------------------------------------------------

    async def on_commit(self, message: Commit, sender: PeerId) -> None:
        """Add the weight gradient to the sums, once, if the path names me; else free its place.

        Others than the data node pass it on to those who worked in vain.
        """
        work = self._works.get(message.work)
        is_from_data_node = sender == message.data_node
        if self._ledger.names_me(message.data_node, message.path):
            if is_from_data_node:
                await self._commit_and_tell(message, work)
        elif is_from_data_node or (work is not None and sender in work.contacts):
            await self._lose_out(message, work, sender)

    async def _commit_and_tell(self, message: Commit, work: Passage | None) -> None:
        if work is not None:
            work.commit = message
        async with trio.open_nursery() as nursery:
            if work is not None:
                nursery.start_soon(self._ctx.send_all, branch_losers(work, message.path), message)
            await self.commit(message.work)
            await self._ctx.faults.reach("after_commit", message.step)

    async def _lose_out(self, message: Commit, work: Passage | None, sender: PeerId) -> None:
        """Another branch counts."""
        if work is None:
            self._released.add(message.work)
            return
        losers = [p for p in branch_losers(work, message.path) if p != sender]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._ctx.send_all, losers, message)
            await self.on_release(message.work)

    async def commit(self, work_id: WorkId) -> None:
        """Move a pending gradient into the sums; other tries at its slot are over."""
        if not self.sums.has_pending(work_id):
            return
        if not await self.sums.commit(work_id):
            await self.on_release(work_id)
            return
        work = self._works[work_id]
        work.end()
        self._ctx.observer.count("microbatches_committed", stage=str(self._ctx.stage))
        self._gauge_capacity()
        for other in [w for w in self._works.values() if _same_slot(w.id, work_id)]:
            if other is not work:
                await self.on_release(other.id)

    async def on_release(self, work_id: WorkId) -> None:
        """Forget a try that another one replaces, or that served its purpose."""
        self._released.add(work_id)
        work = self._works.get(work_id)
        slot = (work_id.data_node, work_id.slot)
        if work is not None and self._ledger.committed.get(slot) != work_id.attempt:
            await self._forget(work)

    async def _forget(self, work: Passage) -> None:
        """Free the place at once; what the stage keeps goes as soon as the worker is free."""
        if self._works.pop(work.id, None) is None:
            return
        self._released.add(work.id)
        self.sums.drop(work.id)
        work.output = work.gradient = None
        work.end()
        self._ahead.uncount_all(work)
        self._gauge_capacity()
        await self._ctx.compute("commit", lambda: self._ctx.state.discard(work.id))

    def _gauge_capacity(self) -> None:
        self._ctx.observer.gauge("capacity_used", self.num_open / self._ctx.capacity)

    # --- failures --------------------------------------------------------------------------

    async def _refuse(
        self, work: Passage, error: NonFinite | ProtocolViolation, sender: PeerId
    ) -> None:
        """The microbatch is tried elsewhere, and the peer that sent such a tensor is named."""
        self._ctx.observer.count("errors", code=error.code)
        self._ctx.observer.event(
            "tensor_refused", code=error.code, cause=f"{error.cause}, sent by {sender}"
        )
        await self._report_failure(work, error.cause)

    async def _report_failure(self, work: Passage, reason: str) -> None:
        await self._forget(work)
        message = about(Failed, work.id, stage=self._ctx.stage, reason=reason[:200])
        await self._ctx.try_send(work.id.data_node, message)


def _same_slot(a: WorkId, b: WorkId) -> bool:
    return (a.data_node, a.slot) == (b.data_node, b.slot)
