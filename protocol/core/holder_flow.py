"""A holder's part in the flow of microbatches: forward on, gradient back, commit once.

What it sent (activation up, gradient down) it keeps until the step is over, so that a neighbour
stage can recompute what died with one of its holders (architecture section 4, point 6).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from protocol.core.context import Context
from protocol.errors import NonFinite, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    Backward,
    Busy,
    Commit,
    Decision,
    Failed,
    FetchBoundary,
    Forward,
    WorkId,
)
from protocol.ports import Envelope, JobKind, Tensor
from protocol.step.ledger import SlotId, StepLedger

BUSY_PAUSE_S = 0.05
BUSY_PAUSE_LIMIT_S = 1.0
T = TypeVar("T")


@dataclass(slots=True)
class Work:
    """One try at one microbatch, as this holder sees it."""

    id: WorkId
    path: tuple[PeerId, ...]
    purpose: str
    target_stage: int
    target: PeerId | None
    next: PeerId | None = None
    sent_at: float = 0.0
    pause_s: float = BUSY_PAUSE_S
    output: Tensor | None = None
    gradient: Tensor | None = None
    is_back: bool = False
    is_pending: bool = False
    is_over: bool = False
    is_forgotten: bool = False
    avoid: set[PeerId] = field(default_factory=set)

    @property
    def previous(self) -> PeerId:
        """Who sent it here."""
        return self.path[-1] if self.path else self.id.data_node


class HolderFlow:
    """The microbatches of one step at a holder of stages 1..S."""

    def __init__(self, ctx: Context, decision: Decision, ledger: StepLedger) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self.decision = decision
        self._works: dict[WorkId, Work] = {}
        self._released: set[WorkId] = set()
        self.redriven: dict[SlotId, trio.Event] = {}
        self.heard_at: dict[PeerId, float] = {}

    @property
    def num_open(self) -> int:
        """Microbatches in flight or with an uncommitted gradient; repairs have a slot apart."""
        return sum(not w.is_over and w.purpose != "redrive" for w in self._works.values())

    # --- forward ---------------------------------------------------------------------------

    async def on_forward(self, envelope: Envelope) -> None:
        """Compute this stage and hand the activation on."""
        message = envelope.message
        assert isinstance(message, Forward)
        if not self._accepts(message, envelope) or message.work in self._works:
            return
        ctx = self._ctx
        reserve = 1 if message.is_first_try and ctx.capacity > 1 else 0
        if not self._knows_both(message, envelope.sender) or (
            self.num_open >= ctx.capacity - reserve
        ):
            await ctx.try_send(envelope.sender, _about(Busy, message, stage=ctx.stage))
            return
        self.heard_at[message.data_node] = trio.current_time()
        work = Work(
            message.work, message.path, message.purpose, message.target_stage, message.target
        )
        self._works[work.id] = work
        ctx.observer.gauge("capacity_used", self.num_open / self._ctx.capacity)
        keep = self._needs_backward(work)
        h_BTW = envelope.tensors[0]
        try:
            work.output = await self._compute(
                work, "forward", lambda: ctx.blocks.forward(work.id, h_BTW, keep=keep)
            )
        except (NonFinite, ProtocolViolation) as error:
            await self._refuse(work, error, envelope.sender)
            return
        await ctx.faults.reach("after_forward", message.step)
        if work.id in self._released:
            await self._forget(work)
            return
        await self._hand_on(work)
        work.is_over = work.is_over or not keep

    def _needs_backward(self, work: Work) -> bool:
        return work.purpose == "train" or (
            work.purpose == "redrive" and self._ctx.stage >= work.target_stage
        )

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
        )

    def _knows_both(self, message: Forward, sender: PeerId) -> bool:
        """Whether sender and data node belong to the step, which may be so a moment later."""
        return (
            self.decision.stage_of(sender) == self._ctx.stage - 1
            and message.data_node in self.decision.data_nodes
        )

    async def _compute(self, work: Work, kind: JobKind, job: Callable[[], T]) -> T | None:
        """Run a job of a try, or none if the try was forgotten before the job's turn came."""
        return await self._ctx.compute(kind, lambda: None if work.is_forgotten else job())

    async def _hand_on(self, work: Work) -> None:
        """Send the activation to the next holder; try others while one is gone or full."""
        ctx = self._ctx
        assert work.output is not None
        while work.id not in self._released:
            work.next = self._choose_next(work)
            if work.next is None:
                if not work.avoid:
                    await self._report_failure(work, "no holder of the next stage")
                    return
                work.avoid.clear()
                await trio.sleep(work.pause_s)  # each offer carries the whole activation
                work.pause_s = min(2 * work.pause_s, BUSY_PAUSE_LIMIT_S)
                continue
            work.sent_at = trio.current_time()
            ctx.router.sent(work.next, work.sent_at, data_node=work.id.data_node)
            message = Forward(
                step=work.id.step, data_node=work.id.data_node, slot=work.id.slot,
                attempt=work.id.attempt, stage=ctx.stage + 1, path=(*work.path, ctx.me),
                purpose=work.purpose, target_stage=work.target_stage, target=work.target,
            )  # fmt: skip
            if await ctx.try_send(work.next, message, (work.output,)):
                return
            self._uncount(work, is_fault=True)
            if ctx.stage == ctx.num_stages:
                await self._forget(work)  # the data node is gone: nobody wants it any more
                return
            work.avoid.add(work.next)

    def _choose_next(self, work: Work) -> PeerId | None:
        ctx = self._ctx
        if ctx.stage == ctx.num_stages:
            return work.id.data_node
        if work.target is not None and ctx.stage + 1 == work.target_stage:
            return work.target
        return ctx.router.choose(
            ctx.stage + 1, work.avoid, trio.current_time(),
            data_node=work.id.data_node, previous=work.previous,
        )  # fmt: skip

    def _uncount(self, work: Work, *, is_fault: bool) -> None:
        """The next hop will not send the gradient back."""
        assert work.next is not None
        self._ctx.router.lost(
            work.next, trio.current_time(), data_node=work.id.data_node, is_fault=is_fault
        )

    async def on_busy(self, message: Busy, sender: PeerId) -> None:
        """The next hop has no room: offer the activation to another one."""
        work = self._works.get(message.work)
        if work is None or work.next != sender or work.gradient is not None:
            return
        if work.is_forgotten or work.output is None:
            return
        self._uncount(work, is_fault=False)
        work.avoid.add(sender)
        await self._hand_on(work)

    # --- backward and commit ---------------------------------------------------------------

    async def on_backward(self, envelope: Envelope) -> None:
        """Compute the input's gradient, send it on at once, keep the weights' apart."""
        message = envelope.message
        assert isinstance(message, Backward)
        ctx = self._ctx
        work = self._works.get(message.work)
        if work is None or work.is_back or work.is_over or not envelope.tensors:
            return
        if envelope.sender != work.next or message.stage != ctx.stage:
            return
        work.is_back = True
        self.heard_at[message.data_node] = trio.current_time()
        now = trio.current_time()
        ctx.router.returned(envelope.sender, now - work.sent_at, now, data_node=work.id.data_node)
        g_BTW = envelope.tensors[0]
        try:
            work.gradient = await self._compute(
                work, "backward", lambda: ctx.blocks.backward(work.id, g_BTW)
            )
        except (NonFinite, ProtocolViolation) as error:
            await self._refuse(work, error, envelope.sender)
            return
        if work.id in self._released:
            await self._forget(work)
            return
        if work.purpose == "redrive":
            await self._end_redrive(work)
            if ctx.stage == work.target_stage:
                return
        else:
            work.is_pending = True
        await self._send_back(work, message.path)
        await ctx.faults.reach("after_input_gradient", message.step)

    async def _send_back(self, work: Work, path: tuple[PeerId, ...]) -> None:
        ctx = self._ctx
        assert work.gradient is not None
        message = Backward(
            step=work.id.step, data_node=work.id.data_node, slot=work.id.slot,
            attempt=work.id.attempt, stage=ctx.stage - 1, path=path,
        )  # fmt: skip
        if not await ctx.try_send(work.previous, message, (work.gradient,)):
            await self._report_failure(work, "the previous hop is gone")

    async def on_commit(self, message: Commit) -> None:
        """Add the weight gradient to the sums, once, if the path names me."""
        if self._ledger.names_me(message.data_node, message.path):
            await self.commit(message.work)
            await self._ctx.faults.reach("after_commit", message.step)

    async def commit(self, work_id: WorkId) -> None:
        """Move a pending gradient into the sums; other tries at its slot are over."""
        work = self._works.get(work_id)
        if work is None or not work.is_pending:
            return
        if not await self._ctx.compute("commit", lambda: self._commit_once(work)):
            await self.on_release(work_id)
            return
        self._ctx.observer.count("microbatches_committed", stage=str(self._ctx.stage))
        self._ctx.observer.gauge("capacity_used", self.num_open / self._ctx.capacity)
        for other in [w for w in self._works.values() if _same_slot(w.id, work_id)]:
            if other is not work:
                await self.on_release(other.id)

    def _commit_once(self, work: Work) -> bool:
        """One job of the worker, so that sums and ledger never disagree."""
        if not work.is_pending or not self._ledger.has_room_for(work.id):
            return False
        self._ctx.state.commit(work.id, self._ctx.group_of(work.id))
        self._ledger.commit(work.id)
        work.is_pending, work.is_over = False, True
        return True

    def has_pending(self, work_id: WorkId) -> bool:
        """Whether a weight gradient waits for the word that it counts."""
        work = self._works.get(work_id)
        return work is not None and work.is_pending

    async def on_release(self, work_id: WorkId) -> None:
        """Forget a try that another one replaces, or that served its purpose."""
        self._released.add(work_id)
        work = self._works.get(work_id)
        slot = (work_id.data_node, work_id.slot)
        if work is None or self._ledger.committed.get(slot) == work_id.attempt:
            return
        if work.output is None:
            return  # its forward is being computed and sees the release when it ends
        if work.next is not None and work.gradient is None:
            self._uncount(work, is_fault=False)
        await self._forget(work)

    async def on_decision(self, decision: Decision) -> None:
        """A new roster: void is what came from a data node that left, or went to such a holder."""
        self.decision = decision
        for work in list(self._works.values()):
            if work.id.data_node not in decision.data_nodes:
                await self._forget(work)
            elif work.next and work.next not in decision.members and self._awaits_next(work):
                await self._report_failure(work, "the next hop left the roster")

    def _awaits_next(self, work: Work) -> bool:
        return not work.is_back and not work.is_over

    # --- repair ----------------------------------------------------------------------------

    async def on_fetch_boundary(self, message: FetchBoundary, sender: PeerId) -> None:
        """Answer with the tensor that was sent up or down for this microbatch."""
        work = self._works.get(message.work)
        tensor = None
        if work is not None and sender in self.decision.members:
            tensor = work.output if message.direction == "activation" else work.gradient
        await self._ctx.answer_boundary(message, sender, tensor)

    async def on_peer_down(self, peer: PeerId) -> None:
        """Tell the data node of every microbatch that went to a peer that is gone."""
        for work in list(self._works.values()):
            if work.next != peer or not self._awaits_next(work):
                continue
            if peer == work.id.data_node:
                await self._forget(work)
            else:
                self._uncount(work, is_fault=True)
                await self._report_failure(work, "the next hop is gone")

    async def _end_redrive(self, work: Work) -> None:
        """Only the holder that lost this gradient accumulates it; the others just pass it on."""
        ctx = self._ctx
        work.is_over = True
        slot = (work.id.data_node, work.id.slot)
        if ctx.stage == work.target_stage and work.target == ctx.me:
            await ctx.compute("commit", lambda: self._commit_redriven(work.id, slot))
            if slot in self.redriven:
                self.redriven[slot].set()
        else:
            await ctx.compute("commit", lambda: ctx.state.discard(work.id))

    def _commit_redriven(self, work_id: WorkId, slot: SlotId) -> None:
        """In the worker: only while the closing waits for it, or two holders might have it."""
        if slot in self.redriven and self._ledger.has_room_for(work_id):
            self._ctx.state.commit(work_id, self._ctx.group_of(work_id))
            self._ledger.commit(work_id)
        else:
            self._ctx.state.discard(work_id)

    async def _refuse(
        self, work: Work, error: NonFinite | ProtocolViolation, sender: PeerId
    ) -> None:
        """The microbatch is tried elsewhere, and the peer that sent such a tensor is named."""
        self._ctx.observer.count("errors", code=error.code)
        self._ctx.observer.event(
            "tensor_refused", code=error.code, cause=f"{error.cause}, sent by {sender}"
        )
        await self._report_failure(work, error.cause)

    async def _report_failure(self, work: Work, reason: str) -> None:
        await self._forget(work)
        message = Failed(
            step=work.id.step, data_node=work.id.data_node, slot=work.id.slot,
            attempt=work.id.attempt, stage=self._ctx.stage, reason=reason[:200],
        )  # fmt: skip
        await self._ctx.try_send(work.id.data_node, message)

    async def _forget(self, work: Work) -> None:
        """Free the slot at once; what the stage keeps goes as soon as the worker is free."""
        if work.is_forgotten:
            return
        self._released.add(work.id)
        work.is_forgotten, work.is_over, work.is_pending = True, True, False
        work.output = None
        if work.purpose == "eval":
            self._works.pop(work.id, None)
        self._ctx.observer.gauge("capacity_used", self.num_open / self._ctx.capacity)
        await self._ctx.compute("commit", lambda: self._ctx.state.discard(work.id))


def _same_slot(a: WorkId, b: WorkId) -> bool:
    return (a.data_node, a.slot) == (b.data_node, b.slot)


def _about(kind: type[Busy], message: Forward, *, stage: int) -> Busy:
    return kind(
        step=message.step, data_node=message.data_node, slot=message.slot,
        attempt=message.attempt, stage=stage,
    )  # fmt: skip
