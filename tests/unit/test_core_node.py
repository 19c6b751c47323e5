"""How a node's core hands messages to their owners and obeys decisions, whenever they come."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
import trio
from core_kit import LIMITS, FakeNetwork, NoPoints, activation, forward, initial_digests
from step_kit import KEYS, PEERS, decision_of, entry_of, manifest_of

from protocol.core import NodeCore, NodePorts, NodeSettings
from protocol.core import early as early_module
from protocol.core.early import EarlyMessages
from protocol.core.journal import MemoryJournal
from protocol.core.member_step import INBOX, OPEN_PER_SENDER, MemberStep
from protocol.core.postbox import OPEN_PER_PEER, Postbox
from protocol.core.snapshots import MemorySnapshots
from protocol.core.transfer import Donor
from protocol.errors import ProtocolViolation
from protocol.keys import NodeKey, PeerId
from protocol.messages import (
    Assign,
    Commit,
    Decision,
    FetchBoundary,
    Forward,
    Presence,
    ReducePart,
    Release,
    StepClose,
    StepOpen,
    WorkId,
)
from protocol.ports import Envelope, PeerChange
from protocol.simulation.host import VirtualHost
from protocol.simulation.registry import VirtualRegistry
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.timeline import Timeline
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.trace import Trace, TracingObserver
from protocol.step.decision import sign_close, vote

A, D, ME, PEER, NEXT = PEERS[:5]  # A is the authority and a data node, D another one
STRANGER = PEERS[9]
ROSTER = [(A, D), (ME, PEER), (NEXT,)]
SWARM = manifest_of().swarm_id


def opening(step: int = 0, term: int = 1, roster=ROSTER, **changes: object) -> Decision:
    fields: dict[str, object] = {"swarm": SWARM, "digests": initial_digests()}
    return decision_of(roster, step=step, term=term, **(fields | changes))


def signed(decision: Decision, key: NodeKey = KEYS[0]) -> StepOpen:
    return StepOpen(step=decision.step, decision=decision, votes=(vote(decision, key),))


class Node:
    """A core on fakes; its tasks run only where a test starts them."""

    def __init__(self, nursery: trio.Nursery, index: int = 2, stage: int | None = 1) -> None:
        key, timeline = KEYS[index], Timeline()
        nursery.start_soon(timeline.run)
        host = VirtualHost("n", key.peer_id, timeline)
        self.network = FakeNetwork(key.peer_id)
        self.observer = TracingObserver("n", Trace())
        self.journal, manifest = MemoryJournal(), manifest_of()
        self.points = NoPoints()
        ports = NodePorts(
            network=self.network, registry=VirtualRegistry(lambda: 0.0).attach(host),
            runner=VirtualRunner(host), make_stage=lambda stage: toy_stage(manifest, stage),
            journal=self.journal, observer=self.observer, faults=self.points, rng=Random(0),
            snapshots=MemorySnapshots(),
        )  # fmt: skip
        settings = NodeSettings(stage=stage, deadlines=LIMITS)
        self.core = NodeCore(key, manifest, ports, settings)

    async def take_stage(self, stage: int = 1) -> None:
        await self.core._take_stage(stage)

    def hear(self, sender, message, tensors=()) -> None:
        self.core._on_envelope(Envelope(sender, message, tensors))


@pytest.fixture
async def node(nursery, autojump_clock) -> Node:
    node = Node(nursery)
    await node.take_stage()
    return node


# --- decisions -----------------------------------------------------------------------------


async def test_decisions_are_obeyed_in_order_and_only_with_a_majority(
    autojump_clock, node: Node
) -> None:
    node.hear(A, signed(opening(term=2)))
    node.hear(A, signed(opening(term=1)))
    node.hear(A, signed(opening(term=2, is_final=True)))
    assert node.core.decision == opening(term=2)
    assert node.network.dropped == []
    node.hear(D, signed(opening(term=3), KEYS[1]))
    assert node.core.decision == opening(term=2)
    assert node.network.dropped == [D]
    assert node.journal.decisions == [opening(term=2)]


async def test_a_roster_counts_for_the_stage_that_the_node_serves(
    autojump_clock, node: Node
) -> None:
    """It was started again with another stage; the old decision still names it elsewhere."""
    node.hear(A, signed(opening(roster=[(A, D), (PEER,), (ME, NEXT)])))
    assert not node.core._is_member()
    node.hear(A, signed(opening(term=2)))
    assert node.core._is_member()


async def test_every_term_reaches_the_member_even_while_it_takes_one(
    nursery, autojump_clock, node: Node
) -> None:
    class Slow:
        """Takes a while to obey."""

        def __init__(self) -> None:
            self.decision = opening()

        follow = MemberStep.follow

        async def on_decision(self, decision: Decision) -> None:
            self.decision = decision
            await trio.sleep(5)

    slow = Slow()
    node.core._obey(signed(opening()))
    nursery.start_soon(slow.follow, node.core._changed, lambda: node.core.decision, node.core._heed)
    for term in (2, 3):
        await trio.sleep(1)
        node.core._obey(signed(opening(term=term)))
    await trio.sleep(20)
    assert slow.decision.term == 3
    assert node.core._acted == (0, 3)


async def test_no_step_is_begun_that_is_over_before_it_begins(
    autojump_clock, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node stood still at the first fault point; nothing would end that step again."""
    node.core._obey(signed(opening()))

    async def stand_still(point: str, step: int) -> None:
        node.core._obey(signed(opening(step=1, term=2)))

    monkeypatch.setattr(node.points, "reach", stand_still)
    await node.core._work()
    assert node.core.member is None


# --- messages ------------------------------------------------------------------------------


async def test_messages_of_the_next_step_wait_while_this_one_ends(
    autojump_clock, node: Node
) -> None:
    """A worker may take seconds to end a job; what comes meanwhile would be lost."""
    node.core.member = MemberStep(node.core.ctx, opening(), Donor(node.core.ctx))
    node.core._obey(signed(opening(step=1, term=2)))
    node.hear(D, *parts(forward(WorkId(1, D, 0, 0), 1)))
    node.hear(D, *parts(forward(WorkId(0, D, 0, 0), 1)))  # late, and of this member's step
    assert len(node.core._early) == 1


def parts(envelope: Envelope) -> tuple[Forward, tuple[torch.Tensor, ...]]:
    return envelope.message, envelope.tensors


async def test_parts_of_a_sum_are_taken_from_holders_of_the_stage(
    autojump_clock, node: Node
) -> None:
    part = ReducePart(step=0, term=1, stage=1, shard=0, num_microbatches=1)
    node.hear(PEER, part, (torch.zeros(2),))
    assert len(node.core._averager._early) == 0  # no decision yet
    node.core._obey(signed(opening()))
    for sender in (PEER, NEXT, STRANGER):
        node.hear(sender, part, (torch.zeros(2),))
    assert list(node.core._averager._early) == [PEER]


async def test_only_an_authority_assigns_a_stage_and_only_once(nursery, autojump_clock) -> None:
    node = Node(nursery, stage=None)
    node.hear(D, Assign(step=0, stage=2))
    assert node.core.placement.stage is None
    node.hear(A, Assign(step=0, stage=1))
    node.hear(A, Assign(step=0, stage=2))
    assert node.core.placement.stage == 1


async def test_an_authority_assigns_a_stage_to_whoever_asks(nursery, autojump_clock) -> None:
    authority = Node(nursery, index=0, stage=None)
    authority.core._for_authority(authority.core._presence(), A)
    assert authority.core.placement.stage is None
    authority.core.placement.asks_stage = True
    authority.core._for_authority(authority.core._presence(), A)
    assert authority.core.placement.stage == 1
    absent = Presence(step=0, stage=-1, capacity=1, digest=None)
    authority.hear(ME, absent)
    authority.hear(ME, absent.model_copy(update={"asks_stage": True}))
    nursery.start_soon(authority.core._postbox.run)
    await trio.testing.wait_all_tasks_blocked()
    assert [(peer, m.stage) for peer, m, _ in authority.network.sent] == [(ME, 2)]


# --- one step ------------------------------------------------------------------------------


async def step_of(nursery: trio.Nursery, node: Node) -> MemberStep:
    node.core.routing.on_decision(opening())
    member = MemberStep(node.core.ctx, opening(), Donor(node.core.ctx))
    nursery.start_soon(member.run)
    await trio.testing.wait_all_tasks_blocked()
    return member


async def tell(member: MemberStep, sender, message, tensors=()) -> None:
    member.deliver(Envelope(sender, message, tensors))
    await trio.sleep(1)


async def test_a_data_nodes_word_counts_for_its_own_microbatches(
    nursery, autojump_clock, node: Node
) -> None:
    member = await step_of(nursery, node)
    work = WorkId(0, D, 0, 0)
    for sender, data_node in ((A, D), (PEER, D), (STRANGER, STRANGER)):
        fields = work._replace(data_node=data_node)._asdict()
        await tell(member, sender, Release(**fields))
        await tell(member, sender, Commit(**fields, path=(ME, NEXT)))
    assert len(member.flow._released) == 0
    await tell(member, D, Release(**work._asdict()))
    assert work in member.flow._released


async def test_a_data_node_closes_only_with_what_it_has(nursery, autojump_clock) -> None:
    """It was started again within the step, and others hand on what it said before."""
    node = Node(nursery, index=1, stage=0)
    await node.take_stage(0)
    member = await step_of(nursery, node)
    mine, other = (
        StepClose.model_validate(sign_close(SWARM, 0, entries_of(key), key).model_dump())
        for key in (KEYS[1], KEYS[0])
    )
    await tell(member, A, mine)
    await tell(member, PEER, other)
    assert set(member.ledger.closes) == {A}


def entries_of(key: NodeKey):
    share = next(s for s in opening().shares if s.data_node == key.peer_id)
    return [entry_of(slot, (ME, NEXT)) for slot in share.slots]


async def test_a_bad_message_ends_the_session_of_its_sender(
    nursery, autojump_clock, node: Node
) -> None:
    member = await step_of(nursery, node)
    forged = sign_close(SWARM, 0, entries_of(KEYS[1]), KEYS[1]).model_copy(update={"data_node": A})
    await tell(member, STRANGER, forged)
    assert node.network.dropped == [STRANGER]


async def test_a_flood_costs_its_sender_its_session_and_no_other(
    autojump_clock, node: Node
) -> None:
    member = MemberStep(node.core.ctx, opening(), Donor(node.core.ctx))  # and nobody reads
    release = Release(**WorkId(0, D, 0, 0)._asdict())
    for _ in range(OPEN_PER_SENDER):
        member.deliver(Envelope(D, release))
    with pytest.raises(ProtocolViolation, match="more messages"):
        member.deliver(Envelope(D, release))
    member.deliver(Envelope(A, release))
    member.on_change(PeerChange(D, False))


async def test_a_full_inbox_is_nobodys_fault(
    autojump_clock, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = MemberStep(node.core.ctx, opening(), Donor(node.core.ctx))
    release = Release(**WorkId(0, D, 0, 0)._asdict())
    for number in range(INBOX + 5):
        member.deliver(Envelope(PeerId(f"p{number % 100}"), release))
    member.on_change(PeerChange(D, False))
    assert node.observer.counts["errors"] == 5


async def test_who_asks_and_takes_no_answer_opens_few_tasks(
    nursery, autojump_clock, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question is a task that waits until its answer is acknowledged."""
    member = await step_of(nursery, node)

    async def never(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(node.network, "send", never)
    question = FetchBoundary(**WorkId(0, D, 0, 0)._asdict(), direction="activation", stage=1)
    refused = 0
    for _ in range(2000):
        try:
            member.deliver(Envelope(STRANGER, question))
        except ProtocolViolation:
            refused += 1
        await trio.lowlevel.checkpoint()
    assert refused == 2000 - OPEN_PER_SENDER


async def test_what_was_handled_counts_no_more(nursery, autojump_clock, node: Node) -> None:
    member = await step_of(nursery, node)
    for _ in range(2 * OPEN_PER_SENDER):
        await tell(member, STRANGER, Release(**WorkId(0, D, 0, 0)._asdict()))
    assert not member._open


# --- early messages and posts --------------------------------------------------------------


def test_early_messages_are_bounded_for_each_sender_and_in_all() -> None:
    early = EarlyMessages()
    for slot in range(early_module.KEPT_OF_ONE + 10):
        early.keep(forward(WorkId(0, D, slot, 0), 1))
    early.keep(forward(WorkId(0, A, 7, 0), 1))
    seen: list[int] = []
    early.replay(lambda envelope: seen.append(envelope.message.slot))
    assert seen == [*range(10, early_module.KEPT_OF_ONE + 10), 7]
    assert len(early) == 0
    for number in range(3 * early_module.KEPT):
        sender = PeerId(f"p{number // early_module.KEPT_OF_ONE}")
        early.keep(forward(WorkId(0, D, number, 0), 1, sender=sender))
    assert len(early) == early_module.KEPT


def test_a_flood_of_early_messages_pushes_out_its_own_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    early, seen = EarlyMessages(), Counter[str]()
    monkeypatch.setattr(early_module, "KEPT_BYTES", 10 * activation().nbytes)
    for slot in range(3):
        early.keep(forward(WorkId(0, D, slot, 0), 1))
    for slot in range(1000):
        early.keep(forward(WorkId(0, D, slot, 0), 1, sender=STRANGER))
    early.replay(lambda envelope: seen.update([envelope.sender]))
    assert seen == {D: 3, STRANGER: 7}


def test_what_is_still_early_when_it_is_replayed_stays() -> None:
    early = EarlyMessages()
    for slot in range(4):
        early.keep(forward(WorkId(slot % 2, D, slot, 0), 1))
    early.replay(lambda envelope: early.keep(envelope) if envelope.message.step else None)
    assert len(early) == 2


async def test_posts_go_to_others_and_one_peers_fault_is_only_counted(
    nursery, autojump_clock
) -> None:
    network, observer = FakeNetwork(ME), TracingObserver("n", Trace())
    network.gone.add(D)
    postbox = Postbox(network, observer)
    nursery.start_soon(postbox.run)
    postbox.post((ME, D, PEER), Assign(step=0, stage=1))
    await postbox.flush()
    assert [peer for peer, _, _ in network.sent] == [PEER]
    assert observer.counts["errors"] == 1


async def test_a_peer_that_takes_nothing_holds_few_posts(
    nursery, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, observer = FakeNetwork(ME), TracingObserver("n", Trace())
    num_waiting = 0

    async def send(peer: PeerId, *_: object) -> None:
        nonlocal num_waiting
        if peer == STRANGER:
            num_waiting += 1
            await trio.sleep(20)
            num_waiting -= 1

    monkeypatch.setattr(network, "send", send)
    postbox = Postbox(network, observer)
    nursery.start_soon(postbox.run)
    for _ in range(1000):
        postbox.post((STRANGER, D), Assign(step=0, stage=1))
        await trio.testing.wait_all_tasks_blocked()
    assert num_waiting == OPEN_PER_PEER
    assert observer.counts["errors"] == 1000 - OPEN_PER_PEER
    await postbox.flush()
    assert num_waiting == 0
