"""How this node comes to its stage, and when it goes to another.

The rules are those of ``protocol.joining``; this file looks into the registry, publishes claims,
waits and looks again. Nobody is asked: only who cannot read the registry at all has an authority
choose. Where a decision counts on this node, there it goes. A stage that the owner named is never
left, and stage 0 neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import trio

from protocol.core.context import NodePorts
from protocol.core.discovery import Discovery, Load
from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.joining import (
    Gap,
    Newcomer,
    Seeking,
    Standing,
    best_move,
    choose,
    epoch_of,
    flows_of,
    reason_for,
    standings,
    vacancy,
)
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import Decision, Paused
from protocol.records import Claim
from protocol.routing import FlowReport

OWNERS_REASONS = {None: "", 0: "it feeds the text"}


class Situation(NamedTuple):
    """What the core knows: the decision in force and this node's part in it."""

    decision: Decision | None
    is_member: bool
    is_draining: bool


class Placement:
    """``stage`` is where this node is to serve, None until that is known; ``reason`` says why."""

    def __init__(
        self,
        me: PeerId,
        manifest: Manifest,
        settings: NodeSettings,
        ports: NodePorts,
        *,
        discovery: Discovery,
        last: Decision | None,
        changed: Signal,
        situation: Callable[[], Situation],
        report: Callable[[], FlowReport],
    ) -> None:
        self._me, self._num_stages, self._settings = me, manifest.num_stages, settings
        self._network, self._observer, self._rng = ports.network, ports.observer, ports.rng
        self._discovery, self._changed = discovery, changed
        self._situation, self._report = situation, report
        self._quota = manifest.training.quota
        discovery.load = self._load
        self._last_stage = (last.stage_of(me) if last else None) or 0
        every = dict.fromkeys(range(1, manifest.num_stages + 1), settings.capacity)
        self._flows = {k: flows_of(room) for k, room in (settings.fits or every).items()}
        self._gap = Gap()
        self._since_s = 0.0
        self._asked_at_step = 0
        self.stage = settings.stage
        self.reason = OWNERS_REASONS.get(settings.stage, "its owner asked for it")
        self.asks_stage = False
        self.moves_to: int | None = None
        self.is_bound = settings.stage is not None
        self.lost: tuple[int, ...] = ()

    async def run(self) -> None:
        """Find a stage, then watch whether another one needs this node more."""
        if self.stage is not None:
            self._claim_own(self.stage)
            return
        await self._find()
        while True:
            is_member = self._situation().is_member
            limits = self._settings.deadlines
            await trio.sleep(limits.discovery_rest_s if is_member else limits.discovery_s)
            await self._reconsider()

    # --- the first stage -------------------------------------------------------------------

    async def _find(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._seek)
            await self._changed.until(lambda: bool(self.stage is not None or self._decided_stage()))
            nursery.cancel_scope.cancel()
        if self.stage is None:
            self._go(self._decided_stage() or 1, "the swarm counts on it there")

    def _decided_stage(self) -> int | None:
        """Where the decision counts on this node, if its memory has room for that stage."""
        decision = self._situation().decision
        stage = decision.stage_of(self._me) if decision else None
        return stage if stage in self._flows else None

    def on_assign(self, stage: int) -> None:
        """An authority chose, because this node could not; it does not know what fits here."""
        if self.stage is not None:
            return
        if stage in self._flows:
            self._go(stage, "an authority chose it; the registry could not be read")
        else:
            newcomer = Newcomer(self._me, self._flows)
            fitting = choose(newcomer, self._num_stages, self._others()).stage
            self._go(fitting, "the registry could not be read, and what was assigned does not fit")

    async def _seek(self) -> None:
        """Claim, wait, look again, until a stage is found. Who was here before goes back."""
        limits, wall = self._settings.deadlines, self._settings.wall_clock
        newcomer, before = Newcomer(self._me, self._flows, self._link_s), self._last_stage
        seeking = Seeking(newcomer, self._num_stages, limits.record_lifetime_s)
        blind_since = trio.current_time()
        while self.stage is None:
            is_readable = await self._discovery.fresh_look()
            now, others = trio.current_time(), self._others()
            if before in self._flows and self._situation().decision is None:
                if now - blind_since >= limits.record_refresh_s:
                    self._go(before, "it served this one before it was started again")
            elif not is_readable or not self._discovery.known:
                self.asks_stage = now - blind_since >= limits.record_refresh_s
            else:
                self.asks_stage, blind_since = False, now
                stage = seeking.look(others, wall())
                if stage is not None:
                    self._go(stage, reason_for(stage, self._num_stages, others))
                else:
                    await self._claim(seeking.claim)

    def _go(self, stage: int, reason: str) -> None:
        self.stage, self.reason, self.asks_stage = stage, reason, False
        self._since_s = trio.current_time()
        self._claim_own(stage)
        self._discovery.announce(stage=stage)
        self._observer.event("stage_chosen", stage=stage, reason=reason)
        self._changed.notify()

    async def _claim(self, claim: Claim | None) -> None:
        """Publish a claim, and return up to two ticks later, when rivals' claims can be seen.

        A look follows the last one after a tick at least, so that whoever comes at the same moment
        is seen by then.
        """
        self._discovery.put_claim(claim)
        await self._discovery.fresh_look()
        await trio.sleep(self._rng.uniform(0, 2 * self._settings.deadlines.discovery_s))

    # --- another stage ---------------------------------------------------------------------

    async def _reconsider(self) -> None:
        """Claim a stage that needs this node much more, and ask to be let go at the next step."""
        if self.is_called:
            return
        if self.moves_to is not None:
            self._renew()
            return
        self._drop_old_claim()
        self._heed_decision()
        self._claim_own(self.stage)
        goal = self._goal()
        if not self._gap.see(goal, self._settings.migration) and self._situation().is_member:
            return
        if goal is None:
            return
        epoch = epoch_of(self._settings.wall_clock(), self._settings.deadlines.record_lifetime_s)
        await self._claim(self._leased(goal, epoch))
        await self._discovery.fresh_look()
        if self._goal() != goal:
            self._discovery.put_claim(None)
        elif self._situation().is_member:
            self._ask(goal, epoch)
        else:
            self._discovery.put_claim(None)
            self._go(goal, "nobody served it")

    def _goal(self) -> int | None:
        """Where this node is needed more, if it may go there at all."""
        decision, is_member, is_draining = self._situation()
        if self.stage is None or is_draining or (decision is not None and decision.is_final):
            return None
        rules, others = self._settings.migration, self._others()
        claim = self._discovery.claim
        is_own = claim is not None and claim.stage == self.stage
        me = Standing(self._me, self.stage, self._room, claim=None if is_own else claim)
        if decision is None:
            return vacancy(me, self._num_stages, others, self._flows)
        is_rested = trio.current_time() - self._since_s >= rules.cool_down_s
        if not is_member or not is_rested:
            return None
        return best_move(me, self._num_stages, others, self._flows, rules)

    def _ask(self, goal: int, epoch: int) -> None:
        decision = self._situation().decision
        assert decision is not None
        self.moves_to, self._asked_at_step = goal, decision.step
        self._discovery.put_claim(self._leased(goal, epoch, is_firm=True))
        self._observer.event("move_asked", stage=self.stage, goal=goal)

    def _renew(self) -> None:
        """Hold on to the claim while the step lasts, or give up what is not needed any more."""
        claim = self._discovery.claim
        if claim is not None and self._goal() == self.moves_to:
            self._discovery.put_claim(self._leased(claim.stage, claim.epoch, is_firm=True))
        elif self._situation().is_member:
            self._stay()

    def _stay(self) -> None:
        self.moves_to, self._since_s = None, trio.current_time()
        self._discovery.put_claim(None)

    def goes_to(self, held: int) -> int | None:
        """The stage that this node is to serve now instead of the one it holds, if any."""
        if self.is_called and self.stage != held:
            return self.stage
        if self._situation().is_member or not (self._is_let_go() or self.stage != held):
            return None
        return self.stage

    @property
    def is_called(self) -> bool:
        """Whether an authority has this node rebuild its stage."""
        return bool(self.lost)

    def heed(self, word: Paused) -> bool:
        """An authority may name this node to rebuild a stage; return whether it does so."""
        decision, _, is_draining = self._situation()
        stage = next((r.stage for r in word.rebuilders if r.peer == self._me), None)
        is_current = decision is not None and decision.step == word.step
        if stage is None or not is_current or is_draining or not self._may_serve(stage):
            return False
        self.lost, self.moves_to = word.deserted, None
        if stage != self.stage:
            self._discovery.put_claim(None)
            self._go(stage, "its last holder was lost, and an authority asked to rebuild it")
        return True

    def _may_serve(self, stage: int) -> bool:
        return stage in self._flows and not (self.is_bound and stage != self.stage)

    def end_call(self) -> None:
        """A decision came: whoever calls knows what it says."""
        self.lost = ()

    def _is_let_go(self) -> bool:
        """Whether a step opened without this node as it asked, and its stage has others enough."""
        decision = self._situation().decision
        if self.moves_to is None or self.stage is None or decision is None:
            return False
        num_left = len(decision.roster[self.stage])
        is_next = decision.step > self._asked_at_step
        if not is_next or num_left < self._settings.migration.least_left:
            self._stay()
            return False
        goal, home, self.moves_to = self.moves_to, self.stage, None
        self._go(goal, f"it was the narrowest; before, this node served stage {home}")
        return True

    def _claim_own(self, stage: int | None) -> None:
        """Who serves a stage and is no member yet counts there only while it claims it."""
        if not stage or self._situation().is_member or self._discovery.claim is not None:
            return
        epoch = epoch_of(self._settings.wall_clock(), self._settings.deadlines.record_lifetime_s)
        self._discovery.put_claim(self._leased(stage, epoch))

    def _leased(self, stage: int, epoch: int, *, is_firm: bool = False) -> Claim:
        expires_at = self._settings.wall_clock() + self._settings.deadlines.record_lifetime_s
        return Claim(stage=stage, epoch=epoch, expires_at=expires_at, is_firm=is_firm)

    def _heed_decision(self) -> None:
        """A decision named this node at its old stage while it was about to leave that."""
        decided = self._decided_stage()
        if decided and self._situation().is_member and decided != self.stage:
            self._go(decided, "the swarm counts on it there")

    def _drop_old_claim(self) -> None:
        """A mover's claim stands until it expires: all see it in its new place by then."""
        claim = self._discovery.claim
        if claim is not None and claim.expires_at <= self._settings.wall_clock():
            self._discovery.put_claim(None)

    # --- what is known and told ------------------------------------------------------------

    @property
    def _room(self) -> int:
        """The flows that it carries at its stage, or could at the one that it claims, at least."""
        claim = self._discovery.claim
        stage = claim.stage if self.stage is None and claim else self.stage
        return self._flows.get(stage or 0) or min(self._flows.values())

    def _others(self) -> list[Standing]:
        found = standings(
            self._discovery.known.values(),
            self._situation().decision,
            self._settings.wall_clock(),
            usual=self._room,
        )
        return [node for node in found if node.peer != self._me]

    def _load(self) -> Load:
        """A holder's room for flows and those it carries; a data node's demand is its slots."""
        room, report = self._room, self._report()
        if self.stage == 0:
            decision = self._situation().decision
            shares = decision.shares if decision else ()
            slots = [len(share.slots) for share in shares if share.data_node == self._me]
            room = slots[0] if slots else self._quota
        return Load(room, len(report.inflows), report.cost_s)

    def _link_s(self, peer: PeerId) -> float | None:
        rtt_s = self._network.rtt_s(peer)
        return None if rtt_s is None else rtt_s / 2
