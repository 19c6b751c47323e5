"""One member's part in one step, across the terms of that step.

Owns the nursery in which every microbatch of the step is handled. It ends when a decision opens
another step, or leaves this node out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import trio

from protocol.core.closing import REPEAT_S, Closing
from protocol.core.context import Context
from protocol.core.data_flow import DataFlow
from protocol.core.holder_flow import HolderFlow
from protocol.core.repair import Repair
from protocol.core.signal import Signal
from protocol.core.transfer import Donor
from protocol.errors import NumericsError, PeerError, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    Backward,
    Boundary,
    Busy,
    Commit,
    Computed,
    Decision,
    Failed,
    FetchBoundary,
    FetchState,
    FlowMessage,
    Forward,
    HopLost,
    Ledger,
    Message,
    Redrive,
    Release,
    Resume,
    StepClose,
)
from protocol.ports import Envelope, PeerChange
from protocol.step.ledger import StepLedger

INBOX = 4096
# Messages of one sender that are being handled: each is a task, and an answer may take long.
OPEN_PER_SENDER = 256


class MemberStep:
    """Runs the flow and the closing of one step."""

    def __init__(self, ctx: Context, decision: Decision, donor: Donor) -> None:
        self._ctx = ctx
        self._donor = donor
        self.decision = decision
        self.ledger = StepLedger(ctx.me, ctx.stage, decision.step)
        self.flow: HolderFlow | DataFlow = (
            DataFlow(ctx, decision, self.ledger)
            if ctx.stage == 0
            else HolderFlow(ctx, decision, self.ledger)
        )
        self._repair = Repair(ctx, self.ledger, self.flow)
        self._closing = Closing(ctx, self.ledger, self.flow, self._repair)
        self._inbox, self._outbox = trio.open_memory_channel[Envelope | PeerChange](INBOX)
        self._open: Counter[PeerId] = Counter()
        self._term_scope = trio.CancelScope()
        self._over = trio.Event()
        ctx.times.keep_only(decision.members)
        self.started_at = trio.current_time()

    def deliver(self, envelope: Envelope) -> None:
        """Take a message of this step; ProtocolViolation when its sender floods this node.

        When all together send too much, it is lost: whoever sent the last one need not be at fault.
        """
        if self._open[envelope.sender] >= OPEN_PER_SENDER:
            raise ProtocolViolation("more messages than this node can take")
        try:
            self._inbox.send_nowait(envelope)
        except trio.WouldBlock:
            self._ctx.observer.count("errors", code="resource")
        else:
            self._open[envelope.sender] += 1

    def on_change(self, change: PeerChange) -> None:
        """Take news of a session, unless the step is ending."""
        with suppress(trio.WouldBlock):
            self._inbox.send_nowait(change)

    def takes(self, message: Message) -> bool:
        """Whether a message is of this step; who asks for a past state is told that it is gone."""
        if isinstance(message, FetchState):
            return message.step <= self.decision.step
        if isinstance(message, FlowMessage | StepClose) and message.begun != self.decision.begun:
            return False
        return message.step == self.decision.step and not self._over.is_set()

    @property
    def prepared_digest(self) -> str | None:
        """The digest of the next state, once it is prepared."""
        return self._closing.prepared_digest

    def end(self) -> None:
        """The step is over for this node."""
        self._over.set()

    async def run(self) -> None:
        """Work until ``end``; what is still in flight then is void."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, nursery)
            nursery.start_soon(self._close)
            nursery.start_soon(self._closing.say_again)
            if isinstance(self.flow, DataFlow):
                nursery.start_soon(self.flow.drive, partial(self._publish_close, nursery))
            await self._over.wait()
            nursery.cancel_scope.cancel()

    async def follow(
        self,
        changed: Signal,
        latest: Callable[[], Decision | None],
        heeded: Callable[[Decision], None],
    ) -> None:
        """Take each new term of the same step, until cancelled."""

        def newer() -> Decision | None:
            new, last = latest(), self.decision
            return new if new and new.work == last.work and new.term > last.term else None

        while True:
            await changed.until(lambda: newer() is not None)
            decision = newer()
            assert decision is not None
            await self.on_decision(decision)
            heeded(decision)

    async def on_decision(self, decision: Decision) -> None:
        """A new term of the same step: the roster changed, the closing starts again."""
        left = set(self.decision.members) - set(decision.members)
        self.decision = decision
        self._ctx.times.keep_only(decision.members)
        await self.flow.on_decision(decision)
        for peer in sorted(left):  # its session may well be up: it was suspected, or lags
            self.on_change(PeerChange(peer, False, "left the roster"))
        self._term_scope.cancel()

    # --- messages --------------------------------------------------------------------------

    async def _serve(self, nursery: trio.Nursery) -> None:
        async for item in self._outbox:
            if isinstance(item, PeerChange):
                nursery.start_soon(self._on_change, item)
            else:
                nursery.start_soon(self._guarded, item)

    async def _guarded(self, envelope: Envelope) -> None:
        """The boundary where the fault of one message's sender ends."""
        try:
            await self._dispatch(envelope)
        except PeerError as error:
            self._ctx.observer.count("errors", code=error.code)
            self._ctx.network.drop(envelope.sender, error.cause)
        finally:
            self._open[envelope.sender] -= 1
            if not self._open[envelope.sender]:
                del self._open[envelope.sender]

    async def _dispatch(self, envelope: Envelope) -> None:
        message, sender = envelope.message, envelope.sender
        if isinstance(message, StepClose):
            if message.data_node != self._ctx.me:  # mine counts when I have all that it lists
                self._closing.on_close(message, self.decision)
        elif isinstance(message, Ledger):
            self._closing.on_ledger(message, sender, self.decision)
        elif isinstance(message, Boundary):
            self._repair.on_boundary(envelope)
        elif isinstance(message, FetchBoundary):
            await self.flow.on_fetch_boundary(message, sender)
        elif isinstance(message, FetchState):
            await self._donor.serve(message, sender)
        elif isinstance(message, Forward):
            await self.flow.on_forward(envelope)
        elif isinstance(message, Backward):
            await self.flow.on_backward(envelope)
        elif isinstance(message, Computed):
            await self.flow.on_computed(message, sender)
        elif isinstance(message, Busy):
            await self.flow.on_busy(message, sender)
        elif isinstance(self.flow, HolderFlow):
            await self._dispatch_to_holder(self.flow, envelope)
        else:
            await self._dispatch_to_data_node(self.flow, envelope)

    async def _dispatch_to_holder(self, flow: HolderFlow, envelope: Envelope) -> None:
        """A data node's word counts for its own microbatches, while it belongs to the step.

        A neighbour may pass on which path it named.
        """
        message = envelope.message
        if not isinstance(message, Commit | Release | Resume):
            return
        if message.data_node not in self.decision.data_nodes:
            return
        if isinstance(message, Commit):
            await flow.on_commit(message, envelope.sender)
        elif envelope.sender != message.data_node:
            return
        elif isinstance(message, Resume):
            await flow.on_resume(message)
        else:
            await flow.on_release(message.work)

    async def _dispatch_to_data_node(self, flow: DataFlow, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Failed) and message.data_node == self._ctx.me:
            flow.on_failed(message, envelope.sender)
        elif isinstance(message, HopLost) and message.data_node == self._ctx.me:
            await flow.on_hop_lost(message, envelope.sender)
        elif isinstance(message, Redrive) and message.data_node == self._ctx.me:
            await flow.on_redrive(message, envelope.sender)

    async def _on_change(self, change: PeerChange) -> None:
        if not change.is_up:
            await self.flow.on_peer_down(change.peer)

    # --- closing ---------------------------------------------------------------------------

    def _publish_close(self, nursery: trio.Nursery, close: StepClose) -> None:
        self._closing.on_close(close, self.decision)
        nursery.start_soon(self._repeat_close, close)

    async def _repeat_close(self, close: StepClose) -> None:
        """A session may break under it, so it is said until the step is over."""
        while True:
            await self._ctx.send_all(self.decision.members, close)
            await trio.sleep(REPEAT_S)

    async def _close(self) -> None:
        """Run the closing once per term."""
        while True:
            self._term_scope = trio.CancelScope()
            decision = self.decision
            with self._term_scope:
                if not decision.is_final:
                    await self._closing_guarded(decision)
                await trio.sleep_forever()

    async def _closing_guarded(self, decision: Decision) -> None:
        """A peer's fault ends this try at closing; the authorities answer it with a new term.

        A gradient that is not finite has no remedy here: the step stays open and status says why.
        """
        try:
            await self._closing.run(decision)
        except (PeerError, NumericsError) as error:
            self._ctx.observer.count("errors", code=error.code)
            self._ctx.observer.event(
                "closing_failed", code=error.code, step=decision.step, cause=error.cause
            )
            if isinstance(error, PeerError):
                await self._closing.accuse(decision, error.cause)
