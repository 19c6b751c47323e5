"""A data node's part in the flow: draw, send out, compute the loss, send back, commit, close.

A try that cannot go on is released everywhere and the microbatch is issued again under the next
attempt, with the same content, until it is committed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import trio

from protocol.core.context import Context
from protocol.core.flow import GENERATION_SLOTS, RETRY_PAUSE_S, Flow
from protocol.core.forward_only import ForwardOnly
from protocol.core.signal import Signal
from protocol.errors import NonFinite, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    ATTEMPTS,
    Backward,
    Busy,
    Commit,
    Decision,
    Entry,
    Failed,
    FetchBoundary,
    Forward,
    Purpose,
    Redrive,
    Release,
    StepClose,
    WorkId,
)
from protocol.ports import Envelope, JobKind, Tensor
from protocol.routing import fair_share
from protocol.step.decision import sign_close
from protocol.step.ledger import StepLedger

RETRY_PAUSE_LIMIT_S = 1.0
DEADLINE = "deadline"
T = TypeVar("T")


class DataFlow:
    """The microbatches of one step at their data node."""

    def __init__(self, ctx: Context, decision: Decision, ledger: StepLedger) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self.decision = decision
        self._flows: dict[WorkId, Flow] = {}
        self._attempts: dict[int, int] = {}
        self._entries: list[Entry] = []
        self._shares_changed = Signal()
        self.forward_only = ForwardOnly(ctx, self)
        self.num_reissued = 0

    # --- driving ---------------------------------------------------------------------------

    async def drive(self, publish_close: Callable[[StepClose], None]) -> None:
        """Bring every slot of this data node to its commit, validate if due, then close."""
        if not self._my_slots():
            await self.forward_only.validate_if_due()
            await self._shares_changed.until(lambda: bool(self._my_slots()))
        slots = self._my_slots()
        room = trio.Semaphore(self.window())
        async with trio.open_nursery() as nursery:
            for slot in slots:
                await room.acquire()
                nursery.start_soon(self._bring_home, slot, room)
        await self.forward_only.validate_if_due()
        await self._ctx.faults.reach("before_close", self.decision.step)
        step, begun = self.decision.step, self.decision.begun
        publish_close(sign_close(self._ctx.swarm, step, self._entries, self._ctx.key, begun))

    def _my_slots(self) -> tuple[int, ...]:
        me = self._ctx.me
        return next((s.slots for s in self.decision.shares if s.data_node == me), ())

    def window(self) -> int:
        """Microbatches in flight: as many as flows."""
        wanted = fair_share(self.decision, self._ctx.capacity)
        return self._ctx.router.window(wanted, trio.current_time())

    async def _bring_home(self, slot: int, room: trio.Semaphore) -> None:
        ctx = self._ctx
        while True:
            flow = self.new_flow(slot, "train")
            if await self.attempt(flow):
                await self._commit(flow)
                room.release()
                return
            ctx.observer.count("microbatches_reissued")
            ctx.observer.event("microbatch_reissued", slot=slot, cause=flow.failure)
            self.num_reissued += 1
            await self.give_up(flow)
            await trio.sleep(RETRY_PAUSE_S)

    def new_flow(self, slot: int, purpose: Purpose) -> Flow:
        """The next try at a slot."""
        attempt = self._attempts.get(slot, ATTEMPTS * self.decision.begun - 1) + 1
        self._attempts[slot] = attempt
        flow = Flow(WorkId(self.decision.step, self._ctx.me, slot, attempt), purpose)
        self._flows[flow.id] = flow
        return flow

    def forget_attempts(self, slot: int) -> None:
        """A slot that will never be tried again."""
        self._attempts.pop(slot, None)

    async def attempt(self, flow: Flow) -> bool:
        """Embed, send, and wait until the gradient (or what is wanted) is back."""
        ctx = self._ctx
        if flow.activation is None:
            flow.activation = await ctx.compute(
                "embed", lambda: ctx.edge.embed(flow.id, flow.id.step, flow.id.slot)
            )
        with trio.move_on_after(ctx.deadlines.flow_s):
            await self._send_out(flow)
            await flow.settled.wait()
        flow.settle(DEADLINE)
        self._uncount(flow, is_fault=flow.failure == DEADLINE)
        return flow.failure is None

    async def _send_out(self, flow: Flow) -> None:
        ctx = self._ctx
        assert flow.activation is not None
        while not flow.settled.is_set():
            flow.first = self._choose_first(flow)
            if flow.first is None:
                flow.avoid.clear()
                await trio.sleep(flow.pause_s)  # each offer carries the whole activation
                flow.pause_s = min(2 * flow.pause_s, RETRY_PAUSE_LIMIT_S)
                continue
            flow.sent_at = trio.current_time()
            ctx.router.sent(flow.first, flow.sent_at, data_node=ctx.me)
            flow.counted = flow.first
            message = Forward(
                step=flow.id.step, data_node=ctx.me, slot=flow.id.slot, attempt=flow.id.attempt,
                stage=1, path=(), purpose=flow.purpose,
                target_stage=flow.target_stage, target=flow.target,
            )  # fmt: skip
            if await ctx.try_send(flow.first, message, (flow.activation,)):
                return
            self._uncount(flow, is_fault=True)
            flow.avoid.add(flow.first)

    def _uncount(self, flow: Flow, *, is_fault: bool) -> None:
        """The router counts a try no longer; one that came back it has been told of."""
        if flow.counted is not None:
            self._ctx.router.lost(
                flow.counted, trio.current_time(), data_node=self._ctx.me, is_fault=is_fault
            )
            flow.counted = None

    async def _compute(self, flow: Flow, kind: JobKind, job: Callable[[], T]) -> T | None:
        """Run a job of a try, or none if the try was given up before the job's turn came."""
        return await self._ctx.compute(kind, lambda: None if flow.settled.is_set() else job())

    def _choose_first(self, flow: Flow) -> PeerId | None:
        if flow.target is not None and flow.target_stage == 1:
            return flow.target
        return self._ctx.router.choose(1, flow.avoid, trio.current_time(), data_node=self._ctx.me)

    async def _commit(self, flow: Flow) -> None:
        """The data node's word: this try counts. Said to the path at once; the close repeats it."""
        ctx = self._ctx
        self._ledger.commit(flow.id)
        self._entries.append(
            Entry(slot=flow.id.slot, attempt=flow.id.attempt, path=flow.path, loss=flow.loss)
        )
        message = Commit(
            step=flow.id.step, data_node=ctx.me, slot=flow.id.slot, attempt=flow.id.attempt,
            path=flow.path,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ctx.send_all, flow.path, message)
            await ctx.compute("commit", lambda: ctx.state.commit(flow.id, ctx.group_of(flow.id)))
        ctx.observer.count("microbatches_committed", stage="0")
        ctx.observer.count("tokens", self.tokens_per_microbatch)
        await ctx.faults.reach("after_commit", flow.id.step)

    @property
    def tokens_per_microbatch(self) -> int:
        """Labels in one microbatch."""
        manifest = self._ctx.manifest
        return manifest.training.microbatch * manifest.model.context

    async def give_up(self, flow: Flow) -> None:
        """Release a try at every holder that may have seen it."""
        ctx = self._ctx
        holders = [p for stage in self.decision.roster[1:] for p in stage]
        await ctx.compute("commit", lambda: ctx.state.discard(flow.id))
        message = Release(
            step=flow.id.step, data_node=self._ctx.me, slot=flow.id.slot, attempt=flow.id.attempt
        )
        await ctx.send_all(holders if flow.failure else flow.path, message)
        self._flows.pop(flow.id, None)

    # --- answers from the holders ----------------------------------------------------------

    async def on_forward(self, envelope: Envelope) -> None:
        """The activation came through all stages: compute the loss and start the way back."""
        message = envelope.message
        assert isinstance(message, Forward)
        flow = self._flows.get(message.work)
        if flow is None or flow.path or flow.settled.is_set() or not envelope.tensors:
            return
        if not self._is_whole_path(message.path, envelope.sender):
            return
        flow.path = message.path
        proceed = self._end_forward_only if flow.purpose == "eval" else self._turn_round
        try:
            await proceed(flow, envelope.tensors[0])
        except (NonFinite, ProtocolViolation) as error:
            self._refuse(flow, error, envelope.sender)

    async def _turn_round(self, flow: Flow, h_BTW: Tensor) -> None:
        """Compute the loss and send its gradient back to the last holder."""
        ctx = self._ctx
        computed = await self._compute(
            flow, "edge", lambda: ctx.edge.loss_and_gradient(flow.id, h_BTW)
        )
        if computed is None:
            return
        flow.loss, flow.gradient = computed
        back = Backward(
            step=flow.id.step, data_node=ctx.me, slot=flow.id.slot, attempt=flow.id.attempt,
            stage=ctx.num_stages, path=flow.path,
        )  # fmt: skip
        if not await ctx.try_send(flow.path[-1], back, (flow.gradient,)):
            flow.settle("the last hop is gone")
        elif flow.purpose == "redrive":
            flow.settle()  # the way back ends at the target, which knows by itself

    def _is_whole_path(self, path: tuple[PeerId, ...], sender: PeerId) -> bool:
        roster = self.decision.roster
        return (
            len(path) == self._ctx.num_stages
            and path[-1] == sender
            and all(peer in roster[k + 1] for k, peer in enumerate(path))
        )

    async def _end_forward_only(self, flow: Flow, h_BTW: Tensor) -> None:
        ctx = self._ctx
        if flow.id.slot >= GENERATION_SLOTS:
            flow.result = await self._compute(flow, "edge", lambda: ctx.edge.logits(h_BTW))
        else:
            loss = await self._compute(flow, "edge", lambda: ctx.edge.loss(flow.id, h_BTW))
            flow.loss = math.nan if loss is None else loss
        flow.settle()

    async def on_backward(self, envelope: Envelope) -> None:
        """The gradient came back to the embedding: the microbatch is done."""
        message = envelope.message
        assert isinstance(message, Backward)
        ctx = self._ctx
        flow = self._flows.get(message.work)
        if flow is None or flow.settled.is_set() or not envelope.tensors or not flow.path:
            return
        if flow.purpose != "train" or envelope.sender != flow.path[0] or flow.is_back:
            return
        flow.is_back = True
        now = trio.current_time()
        if flow.counted == envelope.sender:
            ctx.router.returned(envelope.sender, now - flow.sent_at, now, data_node=ctx.me)
            flow.counted = None
        g_BTW = envelope.tensors[0]
        try:
            await self._compute(flow, "edge", lambda: ctx.edge.embed_backward(flow.id, g_BTW))
        except (NonFinite, ProtocolViolation) as error:
            self._refuse(flow, error, envelope.sender)
            return
        flow.settle()

    def _refuse(self, flow: Flow, error: NonFinite | ProtocolViolation, sender: PeerId) -> None:
        self._ctx.observer.count("errors", code=error.code)
        cause = f"{error.cause}, sent by {sender}"
        self._ctx.observer.event("tensor_refused", code=error.code, cause=cause)
        flow.settle(cause)

    def on_failed(self, message: Failed, sender: PeerId) -> None:
        """A holder says that this try cannot go on."""
        flow = self._flows.get(message.work)
        if flow is not None and message.stage and self.decision.stage_of(sender) == message.stage:
            flow.settle(f"stage {message.stage}: {message.reason}")

    async def on_busy(self, message: Busy, sender: PeerId) -> None:
        """The first hop has no room: offer the activation to another one."""
        flow = self._flows.get(message.work)
        if flow is None or flow.first != sender or flow.path or flow.settled.is_set():
            return
        self._uncount(flow, is_fault=False)
        flow.avoid.add(sender)
        await self._send_out(flow)

    def on_peer_down(self, peer: PeerId) -> None:
        """Tries whose first hop is gone cannot come back."""
        for flow in self._flows.values():
            if flow.first == peer and not flow.settled.is_set():
                self._uncount(flow, is_fault=True)
                flow.settle("the first hop is gone")

    async def on_decision(self, decision: Decision) -> None:
        """A new roster: tries that pass a holder that left are issued again."""
        self.decision = decision
        self._shares_changed.notify()
        members = set(decision.members)
        for flow in self._flows.values():
            passed = (*flow.path, *((flow.first,) if flow.first else ()))
            if any(peer not in members for peer in passed):
                flow.settle("a holder left the roster")

    # --- repair ----------------------------------------------------------------------------

    async def on_fetch_boundary(self, message: FetchBoundary, sender: PeerId) -> None:
        """Answer with what went up to stage 1, or down from the head."""
        flow = self._flows.get(message.work)
        tensor = None
        if flow is not None and sender in self.decision.members:
            tensor = flow.activation if message.direction == "activation" else flow.gradient
        await self._ctx.answer_boundary(message, sender, tensor)

    async def on_redrive(self, message: Redrive, sender: PeerId) -> None:
        """Drive a committed microbatch once more, to the one holder that lost its gradient."""
        ctx = self._ctx
        if self.decision.stage_of(sender) != message.stage or message.stage == 0:
            return
        if self._ledger.has_room_for(message.work):
            return  # it was never committed
        flow = self.new_flow(message.slot, "redrive")
        flow.target_stage, flow.target = message.stage, sender
        if await self.attempt(flow):
            await ctx.compute("commit", lambda: ctx.state.discard(flow.id))
        else:
            await self.give_up(flow)
