"""NodeCore: one node of the swarm, the same class in the daemon and in the simulator.

NodeCore.run
|- _receive      one loop takes every message and session change and hands it to its owner
|- Postbox.run   sends what pure parts asked to send
|- _be_present   tells the authorities who this node is and what it holds
|- _discover     publishes this node's record and introduces peers to the network
|- _live         obeys decisions: waits, fetches state, or works through one MemberStep a step
\\- Leading.run   if this node is an authority
"""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from protocol.averaging import Averager, exact_averager
from protocol.averaging_messages import AVERAGING_MESSAGES
from protocol.core.context import Context, with_digest
from protocol.core.data_flow import DataFlow
from protocol.core.discovery import Discovery
from protocol.core.early import EarlyMessages
from protocol.core.journal import Journal
from protocol.core.leading import FOR_AUTHORITIES, Leading
from protocol.core.leaving import Leaving
from protocol.core.member_step import MemberStep
from protocol.core.postbox import Postbox
from protocol.core.reports import step_report
from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.core.sync import StateSync
from protocol.core.transfer import Donor, Joiner
from protocol.errors import PeerError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.messages import (
    Applied,
    Assign,
    Decision,
    Dismiss,
    Message,
    Presence,
    StateChunk,
    StepOpen,
)
from protocol.ports import (
    Envelope,
    FaultPoints,
    Network,
    Observer,
    PeerChange,
    Registry,
    Runner,
    StageState,
    Tensor,
)
from protocol.routing import LoadAwareRouter, Router
from protocol.step.decision import check_step_open


class NodeCore:
    """One node. ``run`` returns when the node was told to leave and its work was handed over."""

    def __init__(
        self,
        key: NodeKey,
        manifest: Manifest,
        *,
        network: Network,
        registry: Registry,
        runner: Runner,
        make_stage: Callable[[int], StageState],
        journal: Journal,
        observer: Observer,
        faults: FaultPoints,
        rng: random.Random,
        settings: NodeSettings,
        averager: Averager | None = None,
        router: Router | None = None,
    ) -> None:
        self._key, self._manifest = key, manifest
        self._network, self._runner, self._make_stage = network, runner, make_stage
        self._journal, self._observer, self._faults, self._rng = journal, observer, faults, rng
        self._settings = settings
        self._averager = averager or exact_averager(manifest, network, settings.deadlines)
        self._router = router or LoadAwareRouter(network.rtt_s)
        self.swarm = manifest.swarm_id
        self.discovery = Discovery(key, manifest, network, registry, observer, settings)
        self._postbox = Postbox(network, observer)
        self.leading: Leading | None = None
        if key.peer_id in manifest.authorities:
            self.leading = Leading(
                key, manifest, self.swarm, network, settings.deadlines, journal, observer,
                self._postbox.post, self._obey,
            )  # fmt: skip
        self.decision: Decision | None = None
        self.ctx: Context | None = None
        self.member: MemberStep | None = None
        self.is_syncing = False
        self.leaving = Leaving(key.peer_id, manifest.authorities)
        self._donor: Donor | None = None
        self._joiner: Joiner | None = None
        self._sync_state: StateSync | None = None
        self._early = EarlyMessages()
        self._assigned = settings.stage
        self._changed = Signal()
        self._acted: tuple[int, int] = (0, 0)
        self._admission_misses = 0
        self._presence_due = Signal()

    async def run(self) -> None:
        """Serve the swarm until ``drain`` is done or the caller cancels."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            nursery.start_soon(self._postbox.run)
            nursery.start_soon(self._be_present)
            nursery.start_soon(self.discovery.run)
            if self.leading is not None:
                nursery.start_soon(self.leading.run)
            await self._live()
            with trio.move_on_after(self._settings.deadlines.presence_s):
                await self._postbox.flush()  # an authority's last word is what others wait for
            nursery.cancel_scope.cancel()

    def drain(self) -> None:
        """Leave at the next step's opening: finish what is in flight, take no new step."""
        self.leaving.begin(self.decision)
        self.discovery.announce(is_draining=True)
        if self.member is not None and self.member.decision.is_final:
            self.member.end()
        self._presence_due.notify()
        self._changed.notify()

    async def wait_until_done(self) -> None:
        """Return when the training has ended and this node holds the last state."""
        await self._changed.until(
            lambda: (
                self.decision is not None
                and self.decision.is_final
                and self.ctx is not None
                and self._holds_decided_state()
            )
        )

    async def next_logits(self, tokens_BT: Tensor) -> Tensor | None:
        """Run tokens through the swarm (data nodes only); None if it could not be done now."""
        member = self.member
        if member is None or not isinstance(member.flow, DataFlow):
            return None
        return await member.flow.forward_only.next_logits(tokens_BT)

    # --- messages --------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for item in self._network.events:
            if isinstance(item, PeerChange):
                self._on_change(item)
            else:
                self._on_envelope(item)

    def _on_change(self, change: PeerChange) -> None:
        self.discovery.hear_of([change.peer])
        if self.leading is not None:
            self.leading.on_change(change)
        if self.member is not None:
            self.member.on_change(change)

    def _on_envelope(self, envelope: Envelope) -> None:
        """The boundary at which one peer's bad message ends that peer's session."""
        try:
            self._route(envelope)
        except PeerError as error:
            self._observer.count("errors", code=error.code)
            self._network.drop(envelope.sender, error.cause)

    def _route(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, StepOpen):
            check_step_open(message, self.swarm, self._manifest.authorities)
            if self.leading is not None:
                self.leading.on_step_open(message)
            self._obey(message)
        elif isinstance(message, FOR_AUTHORITIES):
            self._for_authority(message, envelope.sender)
        elif isinstance(message, Assign | Dismiss):
            if envelope.sender in self._manifest.authorities:
                self._on_answer(message)
        elif isinstance(message, AVERAGING_MESSAGES):
            if self._is_stage_peer(envelope.sender):
                self._averager.deliver(envelope)
        elif isinstance(message, StateChunk):
            if self._joiner is not None:
                self._joiner.deliver(envelope)
        else:
            self._to_member(envelope)

    def _for_authority(self, message: Message, sender: PeerId) -> None:
        if self.leading is None:
            return
        answer = self.leading.on_message(message, sender)
        if answer is not None and sender == self._key.peer_id:
            self._on_answer(answer)
        elif answer is not None:
            self._postbox.post((sender,), answer)

    def _on_answer(self, message: Assign | Dismiss) -> None:
        """An authority gives this node a stage, once, or lets it go."""
        if isinstance(message, Dismiss):
            self._leave_step()
        elif self._assigned is None:
            self._assigned = message.stage
            self._changed.notify()

    def _leave_step(self) -> None:
        """Nobody can end the step in flight: a node that drains does not wait for that."""
        if self.leaving.dismiss() and self.member is not None:
            self.member.end()
        self._changed.notify()

    def _to_member(self, envelope: Envelope) -> None:
        """Hand a message of the current step to it; keep what comes early, drop what is late.

        A joiner that asks for the state of a past step is answered that it is gone.
        """
        message, member = envelope.message, self.member
        if member is not None and member.takes(message):
            member.deliver(envelope)
        elif self.decision is None or message.step >= self.decision.step:
            self._early.keep(envelope)

    # --- presence --------------------------------------------------------------------------

    async def _be_present(self) -> None:
        """Every ``presence_s``, and at once when something changed."""
        while True:
            presence = self._presence()
            if self.leading is not None:
                self._for_authority(presence, self._key.peer_id)
            self._postbox.post(self._manifest.authorities, presence)
            if not self.leaving.is_governed(self._network.connected()):
                self._leave_step()
            with trio.move_on_after(self._settings.deadlines.presence_s):
                await self._presence_due.wait()

    def _presence(self) -> Presence:
        ctx = self.ctx
        return Presence(
            step=ctx.state.step if ctx else 0,
            stage=ctx.stage if ctx else (-1 if self._assigned is None else self._assigned),
            capacity=self._settings.capacity,
            digest=ctx.state.digest if ctx and not self.is_syncing else None,
            seen=self._acted,
            wants_hold=self._admission_misses > 1,
            is_draining=self.leaving.is_draining,
        )

    # --- decisions -------------------------------------------------------------------------

    def _obey(self, message: StepOpen) -> None:
        """Take a decision if it is later than the last."""
        decision = message.decision
        if self.decision is not None and decision.order <= self.decision.order:
            return
        self.decision = decision
        self._journal.decided(decision)
        self._router.on_decision(decision)
        self.discovery.hear_of(decision.members)
        self._observer.gauge("step", decision.step)
        if self.member is not None and (
            decision.step != self.member.decision.step or not self._is_member()
        ):
            self.member.end()
        self._changed.notify()

    async def _live(self) -> None:
        await self._changed.until(lambda: self._assigned is not None or self.leaving.is_draining)
        if self._assigned is not None:
            await self._take_stage(self._assigned)
        while not self._may_leave():
            if self.decision is not None:
                self._acted = self.decision.order
            if self._is_member() and self._holds_decided_state():
                await self._work()
            elif self.decision is not None and not self._holds_decided_state():
                await self._sync(self.decision)
            else:
                await self._changed.wait()

    async def _take_stage(self, stage: int) -> None:
        """Make the stage's initial state: a function of the seed, so nobody has to be asked."""
        state = await self._runner.run("state", lambda: with_digest(self._make_stage(stage)))
        self.ctx = Context(
            key=self._key, manifest=self._manifest, swarm=self.swarm, network=self._network,
            runner=self._runner, router=self._router, averager=self._averager,
            deadlines=self._settings.deadlines, observer=self._observer, faults=self._faults,
            journal=self._journal, rng=self._rng, stage=stage, state=state,
            capacity=self._settings.capacity,
            loopback=lambda m: self._for_authority(m, self._key.peer_id),
        )  # fmt: skip
        self._donor, self._joiner = Donor(self.ctx), Joiner(self.ctx)
        self._sync_state = StateSync(
            self._joiner, self._observer, self._rng, self._changed, self._wants_state_of
        )
        self.discovery.announce(stage=stage)
        self._observer.gauge("stage", stage)
        self._presence_due.notify()

    def _may_leave(self) -> bool:
        return self.leaving.may_go(self.decision, self._is_member())

    def _is_member(self) -> bool:
        return self._is_stage_peer(self._key.peer_id)

    def _is_stage_peer(self, peer: PeerId) -> bool:
        """Whether the decision counts on a peer for the stage that this node serves."""
        if self.decision is None or self.ctx is None:
            return False
        return peer in self.decision.roster[self.ctx.stage]

    def _holds_decided_state(self) -> bool:
        assert self.ctx is not None
        assert self.decision is not None
        state = self.ctx.state
        return state.step == self.decision.step and (
            state.digest == self.decision.digests[self.ctx.stage]
        )

    async def _work(self) -> None:
        """One step as a member, then apply what was prepared if the next decision says so."""
        assert self.ctx and self.decision and self._donor
        ctx, first = self.ctx, self.decision
        await self._faults.reach("before_step", first.step)
        if self.decision is not first:
            return  # there is a later one by now
        self._admission_misses = 0
        member = MemberStep(ctx, first, self._donor)
        self.member = member
        self._early.replay(self._to_member)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_terms, member)
            await member.run()
            nursery.cancel_scope.cancel()
        self.member = None
        await self._end_step(member)

    async def _follow_terms(self, member: MemberStep) -> None:
        """New terms of the same step reach the member while it runs."""
        while True:
            await self._changed.until(lambda: self._newer_term(member) is not None)
            decision = self._newer_term(member)
            assert decision is not None
            await member.on_decision(decision)
            self._acted = decision.order

    def _newer_term(self, member: MemberStep) -> Decision | None:
        decision, last = self.decision, member.decision
        if decision is None or decision.step != last.step or decision.term <= last.term:
            return None
        return decision

    async def _end_step(self, member: MemberStep) -> None:
        assert self.ctx and self.decision
        ctx, decision = self.ctx, self.decision
        finished = decision.step == member.decision.step + 1
        wanted = decision.digests[ctx.stage]
        is_applied = finished and member.prepared_digest == wanted
        if self._donor is not None:
            self._donor.forget()
        if is_applied:
            await ctx.faults.reach("before_apply", member.decision.step)
            await ctx.compute("update", ctx.state.apply)
            await ctx.faults.reach("after_apply", member.decision.step)
            applied = Applied(step=decision.step, stage=ctx.stage, digest=ctx.state.digest)
            self._postbox.post(self._manifest.authorities, applied)
        else:
            await ctx.compute("update", ctx.state.reset)
        self._changed.notify()
        if is_applied and isinstance(member.flow, DataFlow):
            self._journal.step_finished(step_report(ctx, member, member.flow))
        self._presence_due.notify()

    async def _sync(self, decision: Decision) -> None:
        """Fetch the state of the current step."""
        assert self._sync_state is not None
        self.is_syncing = True
        self._admission_misses += 1
        self._early.clear()
        self._presence_due.notify()
        try:
            await self._sync_state.run(decision)
        finally:
            self.is_syncing = False
        self._presence_due.notify()

    def _wants_state_of(self, decision: Decision) -> bool:
        is_current = self.decision is not None and self.decision.step == decision.step
        return is_current and not self._may_leave()
