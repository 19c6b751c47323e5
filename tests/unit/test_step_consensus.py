"""Agreement of the authorities: whatever the network does, one history.

The random runs drive the authorities' own coroutine code (``Leading``) by hand: a bag of messages
that are delivered in any order, twice or never, leaders that compete, and restarts that keep only
what the journal holds. Every decision names the one before it, so that a lost one shows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from step_kit import KEYS, PEERS, SWARM, decision_of, digest_of, manifest_of

from protocol.core.journal import MemoryJournal
from protocol.core.leading import Leading
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId, is_signed_by
from protocol.messages import Accept, Accepted, Decision, Message, Prepare, Promise, StepOpen
from protocol.simulation.trace import Trace, TracingObserver
from protocol.step.consensus import Acceptor, Campaign, Proposal, leader_of, next_ballot
from protocol.step.decision import check_step_open, decision_bytes, majority, vote

THREE = PEERS[:3]
ROSTER = [PEERS[:1], PEERS[5:6]]


def content(decision: Decision) -> str:
    """A decision without the ballot under which it was voted for."""
    return digest_of(decision.model_copy(update={"ballot": 0}).model_dump_json())


# --- the rules -----------------------------------------------------------------------------


def test_each_ballot_belongs_to_one_authority_and_the_next_is_the_lowest() -> None:
    for after in range(7):
        for me in THREE:
            ballot = next_ballot(after, me, THREE)
            assert leader_of(ballot, THREE) == me
            assert after < ballot <= after + 3


def accept(acceptor: Acceptor, ballot: int, **changes: object) -> Accepted:
    decision = decision_of(ROSTER, ballot=ballot, **changes)
    message = Accept(step=decision.step, decision=decision)
    return acceptor.on_accept(message, leader_of(ballot, THREE))


def test_an_acceptor_keeps_its_promise() -> None:
    acceptor = Acceptor(KEYS[0], THREE)
    assert acceptor.on_prepare(Prepare(step=0, ballot=4), leader_of(4, THREE)).is_granted
    assert not acceptor.on_prepare(Prepare(step=0, ballot=4), leader_of(4, THREE)).is_granted
    answer = accept(acceptor, 3)
    assert answer.vote is None
    assert answer.ballot == 4
    assert accept(acceptor, 4).vote is not None


def test_nobody_uses_the_ballot_of_another() -> None:
    acceptor = Acceptor(KEYS[0], THREE)
    assert not acceptor.on_prepare(Prepare(step=0, ballot=4), leader_of(5, THREE)).is_granted
    message = Accept(step=0, decision=decision_of(ROSTER, ballot=4))
    assert acceptor.on_accept(message, leader_of(5, THREE)).vote is None


def test_under_one_ballot_votes_go_forward_only() -> None:
    acceptor = Acceptor(KEYS[0], THREE)
    assert accept(acceptor, 1, term=2).vote is not None
    assert accept(acceptor, 1, term=1).vote is None
    assert accept(acceptor, 1, term=2, is_final=True).vote is None
    assert accept(acceptor, 1, term=2) == accept(acceptor, 1, term=2)


def test_a_later_leader_is_followed_even_from_a_decision_that_nobody_else_has() -> None:
    """Otherwise an authority that alone accepted more would block a majority with it for ever."""
    acceptor = Acceptor(KEYS[0], THREE)
    assert accept(acceptor, 1, term=5).vote is not None
    assert accept(acceptor, 2, term=4).vote is not None


def test_a_campaign_inherits_what_may_be_chosen() -> None:
    campaign = Campaign(5, THREE)

    def promise(ballot: int, order: tuple[int, int], is_granted: bool = True) -> Promise:
        step, term = order
        decision = decision_of(ROSTER, step=step, term=term, ballot=ballot)
        accepted = StepOpen(step=step, decision=decision, votes=())
        return Promise(step=0, ballot=5, is_granted=is_granted, accepted=accepted)

    campaign.on_promise(promise(9, (9, 9), is_granted=False), PEERS[0])
    assert not campaign.is_won
    campaign.on_promise(promise(1, (3, 7)), PEERS[1])
    campaign.on_promise(promise(2, (3, 6)), PEERS[2])
    assert campaign.is_won
    assert campaign.inherited() == decision_of(ROSTER, step=3, term=6, ballot=2)


def test_only_valid_votes_for_this_very_decision_count() -> None:
    """A late vote for the same decision under an older ballot must not choose the new one."""
    decision = decision_of(ROSTER, ballot=4)
    older = decision_of(ROSTER, ballot=1)
    proposal = Proposal(decision, THREE)

    def answer(mine: Decision, key: NodeKey) -> Accepted:
        return Accepted(step=0, term=1, ballot=mine.ballot, vote=vote(mine, key))

    proposal.on_accepted(answer(older, KEYS[0]), PEERS[0])
    proposal.on_accepted(answer(decision, KEYS[0]), PEERS[1])  # another's vote
    proposal.on_accepted(answer(decision, KEYS[7]), PEERS[7])  # no authority
    proposal.on_accepted(answer(decision, KEYS[1]), PEERS[1])
    assert proposal.chosen is None
    proposal.on_accepted(answer(decision, KEYS[2]), PEERS[2])
    assert proposal.chosen is not None
    check_step_open(proposal.chosen, SWARM, THREE)


# --- random runs ---------------------------------------------------------------------------


@dataclass
class Ambition:
    """In the place of Membership: always knows a next decision, and names the one before it."""

    rng: Random
    ballot: int = 0
    current: Decision | None = None
    candidates: dict[PeerId, object] = field(default_factory=dict)

    def on_decided(self, decision: Decision) -> None:
        self.current = decision

    def propose(self, now: float) -> Decision:
        step, term = self.current.order if self.current else (0, 0)
        parent = content(self.current) if self.current else digest_of("nothing")
        choice = digest_of(str(self.rng.random()))
        step += self.rng.random() < 0.5
        return decision_of(
            ROSTER, step=step, term=term + 1, ballot=self.ballot, digests=(parent, choice)
        )


class NoSessions:
    """Nobody sees a session, so that everybody is always ready to take over."""

    def connected(self) -> list[PeerId]:
        return []


class World:
    """Authorities and the messages between them."""

    def __init__(self, num: int, seed: int) -> None:
        self.rng = Random(seed)
        self.keys, self.peers = KEYS[:num], tuple(PEERS[:num])
        self.manifest = manifest_of(authorities=num)
        self.journals = {peer: MemoryJournal() for peer in self.peers}
        self.bag: list[tuple[PeerId, PeerId, Message]] = []
        self.votes: dict[bytes, set[PeerId]] = defaultdict(set)
        self.proposed: dict[bytes, Decision] = {}
        self.published: list[Decision] = []
        self.now = 0.0
        self.authorities = {key.peer_id: self.start(key) for key in self.keys}

    def start(self, key: NodeKey) -> Leading:
        me = key.peer_id

        def post(peers: tuple[PeerId, ...], message: Message) -> None:
            assert me not in peers
            self.bag += [(me, peer, message) for peer in peers]

        leading = Leading(
            key, self.manifest, SWARM, NoSessions(), Deadlines(), self.journals[me],
            TracingObserver("", Trace()), post, self.publish,
        )  # fmt: skip
        leading.membership = Ambition(self.rng)
        return leading

    def publish(self, message: StepOpen) -> None:
        check_step_open(message, SWARM, self.peers)
        self.published.append(message.decision)

    def act(self) -> None:
        """One thing happens."""
        chance = self.rng.random()
        if chance < 0.80 and self.bag:
            self.deliver()
        elif chance < 0.97:
            self.now += self.rng.expovariate(0.5)
            self.authorities[self.rng.choice(self.peers)]._advance(self.now)
        else:
            key = self.rng.choice(self.keys)
            self.authorities[key.peer_id] = self.start(key)

    def deliver(self) -> None:
        index = self.rng.randrange(len(self.bag))
        sender, receiver, message = self.bag[index]
        if self.rng.random() > 0.1:  # else it will come again
            self.bag.pop(index)
        if self.rng.random() < 0.15:
            return
        self.note(message)
        if isinstance(message, StepOpen):
            check_step_open(message, SWARM, self.peers)
            self.authorities[receiver].on_step_open(message)
        else:
            self.authorities[receiver].on_message(message, sender)

    def note(self, message: Message) -> None:
        if isinstance(message, Accept):
            self.proposed[decision_bytes(message.decision)] = message.decision

    def chosen(self) -> dict[tuple[int, int], set[str]]:
        """What a majority has ever voted for, by order, as the journals and answers show."""
        found: dict[tuple[int, int], set[str]] = defaultdict(set)
        for data, decision in self.proposed.items():
            if len(self.votes[data]) >= majority(self.peers):
                found[decision.order].add(content(decision))
        for decision in self.published:
            found[decision.order].add(content(decision))
        return found


def watch_votes(world: World) -> None:
    """Every vote leaves through the journal, before it is said."""
    for peer, journal in world.journals.items():
        save = journal.save_ballot

        def noting(promised: int, accepted: StepOpen | None, peer=peer, save=save) -> None:
            if accepted is not None:
                data = decision_bytes(accepted.decision)
                assert is_signed_by(peer, data, accepted.votes[0].signature)
                world.proposed[data] = accepted.decision
                world.votes[data].add(peer)
            save(promised, accepted)

        journal.save_ballot = noting


@pytest.mark.parametrize("num", [3, 5])
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_the_network_does_there_is_one_history(
    autojump_clock, num: int, seed: int
) -> None:
    world = World(num, seed)
    watch_votes(world)
    for _ in range(400):
        world.act()
    chosen = world.chosen()
    assert all(len(contents) == 1 for contents in chosen.values())
    history = sorted(
        {d.order: d for d in world.proposed.values() if d.order in chosen}.values(),
        key=lambda d: d.order,
    )
    by_content = {content(d): d for d in world.proposed.values()}
    parent = digest_of("nothing")
    for decision in history:
        (name,) = chosen[decision.order]
        assert by_content[name].digests[0] == parent
        parent = name


async def test_random_runs_do_decide_and_do_change_leaders(autojump_clock) -> None:
    """Runs in which nothing is decided, or one leader decides all, would prove nothing."""
    decided, ballots = 0, set()
    for seed in range(12):
        world = World(3, seed)
        for _ in range(400):
            world.act()
        decided += len({d.order for d in world.published})
        ballots |= {d.ballot for d in world.published}
    assert decided > 12 * 3
    assert len(ballots) > 6


async def test_a_majority_goes_on_when_one_is_ahead_and_another_dies(autojump_clock) -> None:
    """0 alone accepted a decision that was never chosen; 1 leads and then 2 is gone."""
    world = World(3, 1)
    a, b, c = world.authorities.values()
    ahead = decision_of(ROSTER, term=5, ballot=3)
    a.on_message(Accept(step=0, decision=ahead), PEERS[0])
    world.bag.clear()
    b._acceptor.promised = 3
    b._advance(1000.0)  # campaigns
    world.bag = [m for m in world.bag if m[1] != PEERS[0]]  # 0 does not hear of it
    while not b._leads:
        world.bag, batch = [], world.bag
        for sender, receiver, message in batch:
            world.authorities[receiver].on_message(message, sender)
    del c
    world.bag.clear()
    b._advance(1001.0)
    for _ in range(4):
        world.bag, batch = [], [m for m in world.bag if PEERS[2] not in m[:2]]
        for sender, receiver, message in batch:
            if not isinstance(message, StepOpen):
                world.authorities[receiver].on_message(message, sender)
    assert [d.ballot for d in world.published] == [4]


async def test_one_authority_decides_by_itself(autojump_clock) -> None:
    world = World(1, 0)
    (only,) = world.authorities.values()
    for _ in range(3):
        only._advance(0.0)
    assert len(world.published) == 2
    assert world.bag == []
    assert world.journals[PEERS[0]].ballot[1].decision == world.published[-1]
