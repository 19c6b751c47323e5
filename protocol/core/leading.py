"""An authority's coroutine: leads if the ballot is its own, votes in any case.

The rules are ``step.membership`` (what to decide) and ``step.consensus`` (how it is agreed); this
file only moves their messages.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from protocol.core.context import NodePorts
from protocol.core.journal import Journal
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.messages import (
    Accept,
    Accepted,
    Applied,
    Assign,
    Decision,
    Message,
    Paused,
    Prepare,
    Prepared,
    Presence,
    Promise,
    StepOpen,
    Suspect,
)
from protocol.ports import Network, Observer, PeerChange
from protocol.step.consensus import Acceptor, Campaign, Proposal, leader_of, next_ballot
from protocol.step.membership import Membership

FOR_AUTHORITIES = (Presence, Prepared, Applied, Suspect, Prepare, Promise, Accept, Accepted)
TICK_S = 0.25
SendAll = Callable[[tuple[PeerId, ...], Message], None]


class Leading:
    """One authority. ``post`` sends in the background; ``publish`` obeys a chosen decision here."""

    def __init__(
        self,
        key: NodeKey,
        manifest: Manifest,
        swarm: str,
        network: Network,
        deadlines: Deadlines,
        journal: Journal,
        observer: Observer,
        post: SendAll,
        publish: Callable[[StepOpen], None],
    ) -> None:
        self._key = key
        self._authorities = manifest.authorities
        self._network = network
        self._deadlines = deadlines
        self._journal = journal
        self._observer = observer
        self._post = post
        self._publish = publish
        promised, accepted = journal.load_ballot()
        self._acceptor = Acceptor(key, self._authorities, promised, accepted)
        self._campaign: Campaign | None = None
        self._proposal: Proposal | None = None
        self._leads = False
        self._heard_at = 0.0
        self._asked_at = 0.0
        self._wake = trio.Event()
        self.membership = Membership(manifest, swarm, deadlines, history=journal.past_decisions)
        self.latest: StepOpen | None = None
        self.pause: Paused | None = None

    async def run(self) -> None:
        """Propose whenever something changed; take over when the leader falls silent."""
        self._heard_at = self.membership.watching_since = trio.current_time()
        while True:
            self.membership.forget_the_gone(trio.current_time())
            self._advance(trio.current_time())
            self._watch_stages(trio.current_time())
            self._wake = trio.Event()
            with trio.move_on_after(TICK_S):
                await self._wake.wait()

    def _watch_stages(self, now: float) -> None:
        """See whether a stage keeps the step from ending: whoever is present is told."""
        rules = self.membership
        deserted, stateless = rules.deserted_stages(now), rules.stateless_stages(now)
        rebuilders = rules.rebuilders(now)
        self.pause = None
        if deserted or stateless:
            assert rules.current is not None
            self.pause = Paused(
                step=rules.current.step, deserted=deserted, stateless=stateless,
                rebuilders=rebuilders,
            )  # fmt: skip

    # --- what happened ---------------------------------------------------------------------

    def on_message(self, message: Message, sender: PeerId) -> Assign | Paused | None:
        """Take a message that is meant for an authority; return what its sender is to hear."""
        now = trio.current_time()
        if isinstance(message, Presence):
            self._on_presence(message, sender, now)
        elif isinstance(message, Prepared):
            self.membership.on_prepared(sender, message)
        elif isinstance(message, Suspect):
            if self.membership.on_suspect(sender, message, now):
                self._observer.event("peer_suspected", peer=message.peer, reason=message.reason)
        elif sender in self._authorities:
            self._on_ballot(message, sender)
        self._wake.set()
        return self._answer_to(message, sender) if isinstance(message, Presence) else None

    def _answer_to(self, presence: Presence, sender: PeerId) -> Assign | Paused | None:
        """A stage for whoever cannot choose one; no waiting for a step that cannot end."""
        if presence.asks_stage:
            return Assign(step=0, stage=self.membership.assign(sender, trio.current_time()))
        return self.pause

    def on_change(self, change: PeerChange) -> None:
        """A session came up or went down."""
        self.membership.on_change(change.peer, change.is_up, trio.current_time())
        self._wake.set()

    def on_step_open(self, message: StepOpen) -> None:
        """A decision was chosen, here or by another leader."""
        if message.decision.follows(self.latest.decision if self.latest else None):
            self._heard_at = trio.current_time()
            self.latest = message
            self.membership.on_decided(message.decision)
            self._wake.set()

    def _on_presence(self, message: Presence, sender: PeerId, now: float) -> None:
        self.membership.on_presence(sender, message, now)
        latest = self.latest
        if latest is None or sender == self._key.peer_id:
            return
        if message.seen[1] < latest.decision.term:
            self._post((sender,), latest)

    # --- agreeing --------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        if not self._leads:
            self._maybe_campaign(now)
            return
        if self._proposal is not None and self._proposal.is_superseded:
            self._leads, self._proposal = False, None
            return
        if self._proposal is None:
            decision = self.membership.propose(now)
            if decision is not None:
                self._start(decision)
        elif now - self._asked_at > self._deadlines.leadership_s / 2:
            self._start(self._proposal.decision)  # votes were lost on the way

    def _maybe_campaign(self, now: float) -> None:
        """The first authority begins at once; the others when nobody was heard for a while."""
        others_lead = self._authorities[0] != self._key.peer_id or self._acceptor.promised > 0
        patience = self._deadlines.leadership_s * (1 + self._authorities.index(self._key.peer_id))
        alone = len(self._authorities) == 1
        if self.leader in self._network.connected():
            self._heard_at = now
        if others_lead and not alone and now - self._heard_at < patience:
            return
        self._heard_at = now
        ballot = next_ballot(self._acceptor.promised, self._key.peer_id, self._authorities)
        self._campaign = Campaign(ballot, self._authorities)
        self._ask(Prepare(step=0, ballot=ballot))

    def _start(self, decision: Decision) -> None:
        self._proposal = Proposal(decision, self._authorities)
        self._asked_at = trio.current_time()
        self._ask(Accept(step=decision.step, decision=decision))

    def _ask(self, message: Prepare | Accept) -> None:
        others = tuple(a for a in self._authorities if a != self._key.peer_id)
        self._post(others, message)
        self._on_ballot(message, self._key.peer_id)

    def _on_ballot(self, message: Message, sender: PeerId) -> None:
        if isinstance(message, Prepare):
            self._answer(self._acceptor.on_prepare(message, sender), sender)
        elif isinstance(message, Accept):
            self._heard_at = trio.current_time()
            self._answer(self._acceptor.on_accept(message, sender), sender)
        elif isinstance(message, Promise) and self._campaign is not None:
            self._campaign.on_promise(message, sender)
            self._end_campaign()
        elif isinstance(message, Accepted) and self._proposal is not None:
            self._proposal.on_accepted(message, sender)
            self._end_proposal()

    def _answer(self, answer: Promise | Accepted, sender: PeerId) -> None:
        """What was promised or accepted is durable before it is said."""
        self._journal.save_ballot(self._acceptor.promised, self._acceptor.accepted)
        if sender == self._key.peer_id:
            self._on_ballot(answer, sender)
        else:
            self._post((sender,), answer)

    def _end_campaign(self) -> None:
        campaign = self._campaign
        assert campaign is not None
        if not campaign.is_won or self._leads:
            return
        self._leads, self._campaign = True, None
        self.membership.ballot = campaign.ballot
        self._observer.event("leadership_won", ballot=campaign.ballot)
        inherited = campaign.inherited()
        latest = self.latest.decision if self.latest else None
        if inherited is not None and (latest is None or inherited.term >= latest.term):
            self._start(inherited.model_copy(update={"ballot": campaign.ballot}))

    def _end_proposal(self) -> None:
        proposal = self._proposal
        assert proposal is not None
        if proposal.chosen is None:
            return
        self._proposal = None
        chosen = proposal.chosen
        self.on_step_open(chosen)
        self._observer.count("terms")
        self._post(self._audience(), chosen)
        self._publish(chosen)

    def _audience(self) -> tuple[PeerId, ...]:
        """Everybody who should know: members and candidates that are there."""
        known = set(self.membership.candidates) | set(self._authorities)
        if self.membership.current is not None:
            known |= set(self.membership.current.members)
        known.discard(self._key.peer_id)
        connected = set(self._network.connected())
        return tuple(sorted(known & connected))

    @property
    def leader(self) -> PeerId:
        """Who leads under the highest ballot promised here."""
        return leader_of(self._acceptor.promised, self._authorities)


def leading_of(
    key: NodeKey,
    manifest: Manifest,
    ports: NodePorts,
    deadlines: Deadlines,
    post: SendAll,
    publish: Callable[[StepOpen], None],
) -> Leading | None:
    """Return an authority's part, None for any other node."""
    if key.peer_id not in manifest.authorities:
        return None
    return Leading(
        key, manifest, manifest.swarm_id, ports.network, deadlines, ports.journal, ports.observer,
        post, publish,
    )  # fmt: skip
