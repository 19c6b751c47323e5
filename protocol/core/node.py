"""NodeCore: one node of the swarm, the same class in the daemon and in the simulator.

NodeCore.run
|- _receive      one loop takes every message and session change and hands it to its owner
|- Postbox.run   sends what pure parts asked to send
|- _be_present   tells the authorities who this node is and what it holds
|- Discovery.run publishes this node's record and introduces peers to the network
|- _live         obeys decisions: waits, fetches state, or works through one MemberStep a step
|- Placement.run finds a stage for this node, and later perhaps another
|- Sessions.run  keeps weights for those who generate or export
|- Routing.run   ticks the flow router and posts what it says
|- Keeper.run    writes snapshots of the stage's state beside the work
\\- Leading.run   if this node is an authority
"""

from __future__ import annotations

import trio

from protocol.averaging import exact_averager
from protocol.core.beginning import Beginning
from protocol.core.context import Context, NodePorts, with_digest
from protocol.core.data_flow import DataFlow
from protocol.core.discovery import Discovery
from protocol.core.early import EarlyMessages
from protocol.core.holding import Holding, keep
from protocol.core.leading import FOR_AUTHORITIES, leading_of
from protocol.core.leaving import Leaving
from protocol.core.member_step import MemberStep
from protocol.core.past_life import PastLife
from protocol.core.pausing import Pausing, tell_if_back
from protocol.core.placement import Placement, Situation
from protocol.core.postbox import Postbox
from protocol.core.presence import presence_of
from protocol.core.reports import step_report
from protocol.core.routing import routing_of
from protocol.core.sessions import Sessions
from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.errors import PeerError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.messages import (
    AVERAGING_MESSAGES,
    Applied,
    Assign,
    Decision,
    FetchInitial,
    Message,
    Paused,
    Presence,
    RoutingMessage,
    SessionMessage,
    StateChunk,
    StepOpen,
)
from protocol.ports import Envelope, PeerChange
from protocol.step.decision import check_step_open


class NodeCore:
    """One node. ``run`` returns when the node was told to leave and its work was handed over."""

    def __init__(
        self, key: NodeKey, manifest: Manifest, ports: NodePorts, settings: NodeSettings
    ) -> None:
        network, journal, observer = ports.network, ports.journal, ports.observer
        self._key, self._manifest, self._settings, self._ports = key, manifest, settings, ports
        self._network, self._runner, self._journal = network, ports.runner, journal
        self._observer, self._faults = observer, ports.faults
        self._averager = ports.averager or exact_averager(manifest, network, settings.deadlines)
        last = journal.last_decision()
        self._past = PastLife(key.peer_id, last.order if last else None)
        self.swarm = manifest.swarm_id
        self.discovery = Discovery(key, manifest, network, ports.registry, observer, settings)
        self._postbox = Postbox(network, observer)
        self.routing = routing_of(
            key.peer_id, manifest, ports, settings, self._postbox.post, self.discovery.room_of
        )
        self.leading = leading_of(
            key, manifest, ports, settings.deadlines, self._postbox.post, self._obey
        )
        self.decision: Decision | None = None
        self.member: MemberStep | None = None
        self.leaving = Leaving(key.peer_id, manifest.authorities)
        self.pausing = Pausing(observer, settings.deadlines.session_silence_s)
        self._holding: Holding | None = None
        self._early = EarlyMessages()
        self._changed = Signal()
        self.placement = Placement(
            key.peer_id, manifest, settings, ports, discovery=self.discovery, last=last,
            changed=self._changed, situation=self._situation,
            report=lambda: self.routing.router.report,
        )  # fmt: skip
        first = Beginning(manifest, network, ports.initial, settings.deadlines, observer)
        self.sessions = Sessions(
            lambda: self.ctx, lambda: self.decision, settings, observer, self._postbox.post, first
        )
        self._acted: tuple[int, int] = (0, 0)
        self._presence_due = Signal()

    async def run(self) -> None:
        """Serve the swarm until ``drain`` is done or the caller cancels."""
        self._network.expect(self._manifest.authorities)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            nursery.start_soon(self._postbox.run)
            nursery.start_soon(self._be_present)
            nursery.start_soon(self.discovery.run)
            nursery.start_soon(self.placement.run)
            nursery.start_soon(keep, self._changed, lambda: self._holding)
            nursery.start_soon(self.routing.run)
            nursery.start_soon(self.sessions.run)
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
        self.routing.drain()
        if self.member is not None and self.member.decision.is_final:
            self.member.end()
        self._presence_due.notify()
        self._changed.notify()

    @property
    def ctx(self) -> Context | None:
        """The stage that this node serves and its ports, once there is one."""
        return self._holding.ctx if self._holding else None

    @property
    def is_syncing(self) -> bool:
        """Whether this node is fetching its stage's state from others."""
        return self._holding is not None and self._holding.sync.is_running

    async def save(self) -> None:
        """The node is being stopped: write its states to disk."""
        if self._holding is not None:
            await self._holding.save()

    async def wait_until_done(self) -> None:
        """Return when the training has ended and this node holds the last state."""
        await self._changed.until(self._is_done)

    def _is_done(self) -> bool:
        holding, last = self._holding, self.decision
        return bool(holding and last and last.is_final and holding.has_state_of(last))

    # --- messages --------------------------------------------------------------------------

    async def _receive(self) -> None:
        async for item in self._network.events:
            if isinstance(item, PeerChange):
                self._on_change(item)
            else:
                self._on_envelope(item)

    def _on_change(self, change: PeerChange) -> None:
        self.discovery.hear_of([change.peer])
        self.routing.on_change(change)
        self.sessions.on_change(change)
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
        elif isinstance(message, Assign | Paused):
            if envelope.sender in self._manifest.authorities:
                self._on_answer(message)
        elif isinstance(message, AVERAGING_MESSAGES):
            if self._is_stage_peer(envelope.sender):
                self._averager.deliver(envelope)
        elif isinstance(message, RoutingMessage):
            self.routing.on_message(message, envelope.sender)
        elif isinstance(message, SessionMessage | FetchInitial):
            self.sessions.on_envelope(envelope)
        elif isinstance(message, StateChunk):
            if not self.sessions.takes_chunk(envelope) and self._holding is not None:
                self._holding.joiner.deliver(envelope)
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

    def _on_answer(self, message: Assign | Paused) -> None:
        """An authority gives the stage that was asked for, or says that nothing goes on."""
        if isinstance(message, Assign):
            return self.placement.on_assign(message.stage)
        self.pausing.hear(message)
        if self.placement.heed(message) and self.member is not None:
            self.member.end()
        return self._leave_step()

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
            self.pausing.look()
            presence = self._presence()
            if self.leading is not None:
                self._for_authority(presence, self._key.peer_id)
            self._postbox.post(self._manifest.authorities, presence)
            if not self.leaving.is_governed(self._network.connected()):
                self._leave_step()
            with trio.move_on_after(self._settings.deadlines.presence_s):
                await self._presence_due.wait()

    def _presence(self) -> Presence:
        return presence_of(
            self._holding, placement=self.placement, capacity=self._settings.capacity,
            seen=self._acted, is_draining=self.leaving.is_draining,
            is_restarted=self._is_barred(), is_paused=self.pausing.word is not None,
        )  # fmt: skip

    # --- decisions -------------------------------------------------------------------------

    def _obey(self, message: StepOpen) -> None:
        """Take a decision if it is later than the last."""
        decision = message.decision
        if not decision.follows(self.decision):
            return
        tell_if_back(self._observer, self.decision, decision)
        self.decision = decision
        self.placement.end_call()
        self._journal.decided(decision)
        self.pausing.end()
        self.routing.on_decision(decision)
        self.discovery.hear_of(decision.members)
        self._network.expect({*decision.members, *self._manifest.authorities})
        self._observer.gauge("step", decision.step)
        member = self.member
        if member is not None and not (self._is_member() and decision.work == member.decision.work):
            member.end()
        if self._holding is not None:
            self._holding.on_decision(decision)
        self._changed.notify()

    async def _live(self) -> None:
        placement, leaving = self.placement, self.leaving
        await self._changed.until(lambda: placement.stage is not None or leaving.is_draining)
        if placement.stage is not None:
            await self._take_stage(placement.stage)
        while not self._may_leave():
            if self.decision is not None and self.decision.order != self._acted:
                self._acted = self.decision.order
                self._presence_due.notify()
            holding = self._holding
            if holding and (stage := placement.goes_to(holding.ctx.stage)):
                await self._take_stage(stage)
            elif holding and self.decision and not holding.has_some_state_of(self.decision):
                await self._take_state()
            elif self._is_member() and not self._is_barred():
                await self._work()
            else:
                await self._changed.wait()

    async def _take_stage(self, stage: int) -> None:
        """Make the stage's initial state: a function of the seed, so nobody has to be asked.

        The state of another stage goes first, for there may be no room for both.
        """
        self._holding = None
        self.sessions.kept.clear()
        self._changed.notify()
        state = await self._runner.run("state", lambda: with_digest(self._ports.make_stage(stage)))
        ctx = Context(
            key=self._key, manifest=self._manifest, swarm=self.swarm, network=self._network,
            runner=self._runner, router=self.routing.router, averager=self._averager,
            deadlines=self._settings.deadlines, observer=self._observer, faults=self._faults,
            journal=self._journal, rng=self._ports.rng, stage=stage, state=state,
            capacity=self._settings.capacity_at(stage), window_changed=self.routing.window_changed,
            loopback=lambda m: self._for_authority(m, self._key.peer_id),
        )  # fmt: skip
        holding = Holding(
            ctx, self._ports.snapshots, self._settings, self._changed, self._wants_state
        )
        await holding.keeper.load_newest()
        await self.sessions.beginning.begin(ctx, self._changed, self._is_past_beginning)
        self._holding = holding
        self.routing.serve(stage, ctx.num_stages, ctx.capacity)
        self.discovery.announce(stage=stage)
        self._observer.gauge("stage", stage)
        self._presence_due.notify()
        self._changed.notify()

    def _is_past_beginning(self) -> bool:
        return self.leaving.is_draining or bool(self.decision and self.decision.step)

    def _situation(self) -> Situation:
        return Situation(self.decision, self._is_member(), self.leaving.is_draining)

    def _is_barred(self) -> bool:
        """Whether an earlier life of this node worked where the decision wants it."""
        return self.decision is not None and self._is_member() and self._past.bars(self.decision)

    def _may_leave(self) -> bool:
        return self.leaving.may_go(self.decision, self._is_member())

    def _is_member(self) -> bool:
        return self._is_stage_peer(self._key.peer_id)

    def _is_stage_peer(self, peer: PeerId) -> bool:
        """Whether the decision counts on a peer for the stage that this node serves."""
        decision, ctx = self.decision, self.ctx
        return bool(decision and ctx and peer in decision.roster[ctx.stage])

    async def _work(self) -> None:
        """One step as a member, then apply what was prepared if the next decision says so."""
        assert self._holding and self.decision
        holding, first = self._holding, self.decision
        await self._faults.reach("before_step", first.step)
        if self.decision is not first:
            return  # there is a later one by now
        holding.sync.num_runs = 0
        member = MemberStep(holding.ctx, first, holding.donor)
        self.member = member
        self._early.replay(self._to_member)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(member.follow, self._changed, lambda: self.decision, self._heed)
            await member.run()
            nursery.cancel_scope.cancel()
        self.member = None
        await self._end_step(member)

    def _heed(self, decision: Decision) -> None:
        self._acted = decision.order

    async def _end_step(self, member: MemberStep) -> None:
        assert self._holding and self.decision
        ctx, decision = self._holding.ctx, self.decision
        is_applied = await self._holding.end_step(member, decision, is_leaving=self._may_leave())
        self._changed.notify()
        if is_applied:
            applied = Applied(step=decision.step, stage=ctx.stage, digest=ctx.state.digest)
            self._postbox.post(self._manifest.authorities, applied)
        if is_applied and isinstance(member.flow, DataFlow):
            self._journal.step_finished(step_report(ctx, member, member.flow))
        self._presence_due.notify()

    async def _take_state(self) -> None:
        """Get the decided state; what came early belongs to a step that passes meanwhile."""
        assert self._holding and self.decision
        await self._holding.take_state(self.decision, self._begin_fetch, self.placement.lost)
        self._presence_due.notify()

    def _begin_fetch(self) -> None:
        self._early.clear()
        self._presence_due.notify()

    def _wants_state(self, decision: Decision) -> bool:
        is_current = self.decision is not None and self.decision.step == decision.step
        is_asked = self._holding is not None and self._holding.is_rebuilding
        return is_current and is_asked == self.placement.is_called and not self._may_leave()
