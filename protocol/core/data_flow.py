"""A data node's part in the flow: draw, send out, compute the loss, send back, commit, close.

A hop that is lost on the way is replaced by whoever is before it; the data node knows the path and
says where to resume. As the last resort a try is released everywhere and the microbatch is issued
again under the next attempt, with the same content, until it is committed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import trio

from protocol.core.context import Context
from protocol.core.flow import RETRY_PAUSE_S, Flow
from protocol.core.forward_only import ForwardOnly
from protocol.core.handing_on import HandingOn
from protocol.core.passage import Path, about, branch_losers, is_whole
from protocol.core.sending_back import SendingBack
from protocol.core.signal import Signal
from protocol.core.window import Window
from protocol.errors import NonFinite, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    ATTEMPTS,
    Backward,
    Busy,
    Commit,
    Computed,
    Decision,
    Entry,
    Failed,
    FetchBoundary,
    Forward,
    HopLost,
    Purpose,
    Redrive,
    Release,
    Resume,
    StepClose,
    WorkId,
)
from protocol.ports import Envelope, JobKind, Tensor
from protocol.step.decision import sign_close
from protocol.step.ledger import StepLedger

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
        self._ahead = HandingOn(ctx, decision)
        self._back = SendingBack(ctx, decision)
        self.forward_only = ForwardOnly(ctx, self)
        self.num_reissued = 0

    # --- driving ---------------------------------------------------------------------------

    async def drive(self, publish_close: Callable[[StepClose], None]) -> None:
        """Bring every slot of this data node to its commit, validate if due, then close."""
        if not self._my_slots():
            await self.forward_only.validate_if_due()
            await self._shares_changed.until(lambda: bool(self._my_slots()))
        slots = self._my_slots()
        room = Window(self.window, self._ctx.window_changed)
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
        return self._ctx.router.window(self.decision, trio.current_time())

    async def _bring_home(self, slot: int, room: Window) -> None:
        ctx = self._ctx
        while True:
            flow = self.new_flow(slot, "train")
            if await self.attempt(flow):
                await self._commit(flow, room)
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

    async def attempt(self, flow: Flow) -> bool:
        """Embed, send, and wait until the gradient (or what is wanted) is back."""
        ctx = self._ctx
        if flow.output is None:
            flow.output = await ctx.compute(
                "embed", lambda: ctx.edge.embed(flow.id, flow.id.step, flow.id.slot)
            )
        with trio.move_on_after(ctx.deadlines.flow_s) as flow.scope:
            flow.latest_at = flow.scope.deadline
            await self._send_out(flow)
            flow.prolong(ctx.times.flow_limit_s())
            await flow.settled.wait()
        if flow.scope.cancelled_caught:
            ctx.times.flow_missed()
        flow.settle(DEADLINE)
        self._ahead.uncount_all(flow, is_fault=flow.failure == DEADLINE)
        return flow.failure is None

    async def _send_out(self, flow: Flow) -> None:
        while not await self._ahead.hand_on(flow):
            await self._ahead.pause(flow)

    async def _compute(self, flow: Flow, kind: JobKind, job: Callable[[], T]) -> T | None:
        """Run a job of a try, or none if the try was given up before the job's turn came."""
        return await self._ctx.compute(kind, lambda: None if flow.is_ended else job())

    async def _commit(self, flow: Flow, room: Window) -> None:
        """The data node's word: this try counts. Said to the path at once; the close repeats it.

        If a hop was lost, branches of it may be anywhere.
        """
        ctx = self._ctx
        self._ledger.commit(flow.id)
        self._entries.append(
            Entry(slot=flow.id.slot, attempt=flow.id.attempt, path=flow.path, loss=flow.loss)
        )
        flow.commit = message = about(Commit, flow.id, path=flow.path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ctx.send_all, self._audience(flow), message)
            await ctx.compute("commit", lambda: ctx.state.commit(flow.id, ctx.group_of(flow.id)))
            room.release()
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
        await ctx.compute("commit", lambda: ctx.state.discard(flow.id))
        peers = self._holders() if flow.failure else self._audience(flow)
        await ctx.send_all(peers, about(Release, flow.id))
        self._flows.pop(flow.id, None)

    def _audience(self, flow: Flow) -> tuple[PeerId, ...]:
        """Who may have seen it: its path, or anybody if a hop was lost on the way."""
        if flow.has_branches:
            return self._holders()
        return (*flow.path, *branch_losers(flow, flow.path))

    def _holders(self) -> tuple[PeerId, ...]:
        return tuple(peer for stage in self.decision.roster[1:] for peer in stage)

    # --- answers from the holders ----------------------------------------------------------

    async def on_forward(self, envelope: Envelope) -> None:
        """The activation came through all stages: compute the loss and start the way back."""
        message, sender = envelope.message, envelope.sender
        assert isinstance(message, Forward)
        flow = self._flows.get(message.work)
        if (
            flow is None
            or not envelope.tensors
            or not is_whole(message.path, self.decision, sender, -1)
        ):
            return
        if flow.is_ended:
            await self._tell_loser(flow, sender)
            return
        self._back.on_source(flow, message, sender)
        flow.path = message.path if flow.source == sender else flow.path
        flow.has_branches |= message.is_repair or flow.is_repair
        if flow.home.is_set():
            if message.is_repair and flow.gradient is not None:
                await self._send_back(flow)
            return
        self._came_home(flow)
        async with trio.open_nursery() as nursery:
            if flow.has_branches:
                nursery.start_soon(self._say_home, flow)
            await self._go_on(flow, envelope)

    async def _go_on(self, flow: Flow, envelope: Envelope) -> None:
        proceed = self._end_forward_only if flow.purpose == "eval" else self._turn_round
        try:
            await proceed(flow, envelope.tensors[0])
        except (NonFinite, ProtocolViolation) as error:
            self._refuse(flow, error, envelope.sender)

    async def _say_home(self, flow: Flow) -> None:
        """The other branches race in vain from now on: nobody need compute any more for them."""
        others = set(self._holders()) - set(flow.path)
        await self._ctx.send_all(sorted(others), about(Computed, flow.id, stage=0))

    def _came_home(self, flow: Flow) -> None:
        times = self._ctx.times
        flow.home.set()
        self._ahead.on_home(flow, flow.path[0])
        if not flow.is_repair and flow.next is not None:
            times.came_home(trio.current_time() - flow.offered_at[flow.next])
        flow.prolong(times.flow_limit_s())

    async def _tell_loser(self, flow: Flow, sender: PeerId) -> None:
        """A branch comes late: whoever sent it is to free its place."""
        if flow.commit is not None and sender not in flow.path:
            await self._ctx.try_send(sender, flow.commit)

    async def _turn_round(self, flow: Flow, h_BTW: Tensor) -> None:
        """Compute the loss and send its gradient back to the last holder."""
        ctx = self._ctx
        computed = await self._compute(
            flow, "edge", lambda: ctx.edge.loss_and_gradient(flow.id, h_BTW)
        )
        if computed is None:
            return
        flow.loss, flow.gradient = computed
        await self._send_back(flow)
        if flow.purpose == "redrive":
            flow.settle()  # the way back ends at the target, which knows by itself

    async def _send_back(self, flow: Flow) -> None:
        lost = await self._back.send_back(flow)
        if lost is not None:
            before = (self._ctx.me, *flow.sources[lost])[-2]
            await self._resume(flow, self._ctx.num_stages, lost, before, ())

    async def _end_forward_only(self, flow: Flow, h_BTW: Tensor) -> None:
        ctx = self._ctx
        loss = await self._compute(flow, "edge", lambda: ctx.edge.loss(flow.id, h_BTW))
        flow.loss = math.nan if loss is None else loss
        flow.settle()

    async def on_backward(self, envelope: Envelope) -> None:
        """The gradient came back to the embedding: the microbatch is done."""
        message, sender = envelope.message, envelope.sender
        assert isinstance(message, Backward)
        ctx = self._ctx
        flow = self._flows.get(message.work)
        if flow is None or not envelope.tensors or not flow.home.is_set():
            return
        if flow.is_ended:
            await self._tell_loser(flow, sender)
        elif self._may_end(flow, message, sender):
            flow.is_back, flow.path = True, message.path
            if not flow.is_repair:
                ctx.times.came_back(trio.current_time() - flow.offered_at[sender])
            self._ahead.on_gradient(flow, sender)
            await self._end(flow, envelope)

    def _may_end(self, flow: Flow, message: Backward, sender: PeerId) -> bool:
        return (
            flow.purpose == "train"
            and not flow.is_back
            and sender in flow.offered_at
            and is_whole(message.path, self.decision, sender, 0)
        )

    async def _end(self, flow: Flow, envelope: Envelope) -> None:
        ctx, g_BTW = self._ctx, envelope.tensors[0]
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

    async def on_computed(self, message: Computed, sender: PeerId) -> None:
        """A neighbour on the path lives and has done its part."""
        flow = self._flows.get(message.work)
        if flow is not None and message.is_backward:
            self._back.on_computed(flow, sender)
        elif flow is not None:
            self._ahead.on_computed(flow, sender)

    async def on_busy(self, message: Busy, sender: PeerId) -> None:
        """The first hop has no room: the activation is offered to another one."""
        flow = self._flows.get(message.work)
        if flow is not None:
            self._ahead.on_busy(flow, sender)

    # --- repair of the path ----------------------------------------------------------------

    async def on_peer_down(self, peer: PeerId) -> None:
        """Replace a first hop that is gone, or left the roster."""
        async with trio.open_nursery() as nursery:
            for flow in list(self._flows.values()):
                if self._ahead.lose(flow, peer):
                    nursery.start_soon(self._replace_first, flow, peer)

    async def _replace_first(self, flow: Flow, peer: PeerId) -> None:
        await self._until_home(flow, self._ctx.times.home_limit_s())
        await self._resume(flow, 1, peer, self._ctx.me, flow.path[1:])

    async def _until_home(self, flow: Flow, limit_s: float) -> None:
        """A lost hop may have passed it on: those behind it need not compute it again then."""
        with trio.move_on_after(limit_s):
            await flow.home.wait()

    async def on_hop_lost(self, message: HopLost, sender: PeerId) -> None:
        """A holder has lost its neighbour: whoever is before that one sends it to another."""
        flow, stage = self._flows.get(message.work), message.stage
        where = self.decision.stage_of(sender)
        if flow is None or flow.is_ended or where is None or stage == 0:
            return
        if where == stage + 1:
            route = (sender, *flow.path[where:])
        elif where == stage - 1 and message.before == sender:
            await self._until_home(flow, self._ctx.times.home_limit_s())
            route = flow.path[stage:]
        else:
            return
        await self._resume(flow, stage, message.peer, message.before, route)

    async def _resume(
        self, flow: Flow, stage: int, peer: PeerId, before: PeerId, route: Path
    ) -> None:
        """The holder ``before`` the lost one goes on from what it keeps, along ``route``."""
        if flow.is_ended or flow.is_back or self.decision.stage_of(before) != stage - 1:
            return
        flow.has_branches = True
        flow.prolong(self._ctx.times.flow_limit_s())
        if before != self._ctx.me:
            message = about(Resume, flow.id, stage=stage, peer=peer, route=route)
            await self._ctx.try_send(before, message)
        elif not await self._ahead.resume(flow, peer, route):
            await self._send_out(flow)

    async def on_decision(self, decision: Decision) -> None:
        """A new roster, and maybe more slots to draw."""
        self.decision = self._ahead.decision = self._back.decision = decision
        self._shares_changed.notify()

    # --- for those who compute again what was lost -----------------------------------------

    async def on_fetch_boundary(self, message: FetchBoundary, sender: PeerId) -> None:
        """Answer with what went up to stage 1, or down from the head."""
        flow = self._flows.get(message.work)
        tensor = None
        if flow is not None and sender in self.decision.members:
            tensor = flow.output if message.direction == "activation" else flow.gradient
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
