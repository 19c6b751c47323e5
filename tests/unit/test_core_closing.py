"""The end of a step at one member: what it waits for, what it says again, whom it accuses."""

from __future__ import annotations

import pytest
import torch
import trio
from core_kit import LIMITS, Bench, activation, bench_of, forward
from step_kit import KEYS, PEERS, SWARM, decision_of, entry_of

from protocol.core.closing import REPEAT_S, Closing
from protocol.core.data_flow import DataFlow
from protocol.core.holder_flow import HolderFlow
from protocol.core.repair import Repair
from protocol.errors import AveragingFailed, PeerTimeout, ProtocolViolation
from protocol.messages import (
    Backward,
    Boundary,
    FetchBoundary,
    Ledger,
    LedgerEntry,
    Prepared,
    Redrive,
    ReducePart,
    StepClose,
    Suspect,
    WorkId,
)
from protocol.ports import Envelope
from protocol.step.decision import sign_close
from protocol.step.ledger import StepLedger

D, ME, PEER, Z = PEERS[:4]
STRANGER = PEERS[9]
ALONE = decision_of([(D,), (ME,), (Z,)], quota=2)
PAIR = decision_of([(D,), (ME, PEER), (Z,)], quota=2)


class Member:
    """A holder of stage 1 at the end of a step."""

    def __init__(self, nursery: trio.Nursery, decision=ALONE) -> None:
        self.bench: Bench = bench_of(nursery, KEYS[1], 1)
        self.decision = decision
        self.ledger = StepLedger(ME, 1, 0)
        self.flow = HolderFlow(self.bench.ctx, decision, self.ledger)
        self.bench.network.hear = self.flow.on_computed
        self.repair = Repair(self.bench.ctx, self.ledger, self.flow)
        self.closing = Closing(self.bench.ctx, self.ledger, self.flow, self.repair)
        self.bench.ctx.router.on_decision(decision, trio.current_time())
        self._nursery = nursery

    async def has_committed(self, *slots: int) -> None:
        for slot in slots:
            work = WorkId(0, D, slot, 0)
            await self.flow.on_forward(forward(work, 1))
            back = Backward(**work._asdict(), stage=1, path=(Z,))
            await self.flow.on_backward(Envelope(Z, back, (activation(slot),)))
            await self.flow.commit(work)
        assert sorted(slot for _, slot in self.ledger.committed) == sorted(slots)

    def close(self, path=(ME, Z)) -> None:
        self.closing.on_close(close_of(path), self.decision)

    def hear_ledger(self, *slots: int, sender=PEER, term: int = 1, stage: int = 1) -> None:
        entries = tuple(LedgerEntry(data_node=D, slot=slot, attempt=0) for slot in slots)
        message = Ledger(step=0, term=term, stage=stage, entries=entries)
        self.closing.on_ledger(message, sender, self.decision)

    def start(self, what, *arguments: object) -> None:
        self._nursery.start_soon(what, *arguments)

    async def run(self) -> None:
        """Until PREPARED, which is then said for ever."""
        with trio.move_on_after(1000):
            await self.closing.run(self.decision)

    async def counted(self) -> list[float]:
        """What the sums of the data node hold, by slot."""
        return self.bench.state.gradient([D])[-4:].tolist()


def close_of(path=(ME, Z), key=KEYS[0]) -> StepClose:
    return sign_close(SWARM, 0, [entry_of(slot, path) for slot in range(2)], key)


@pytest.fixture
def member(nursery, autojump_clock) -> Member:
    return Member(nursery)


@pytest.fixture
def of_two(nursery, autojump_clock) -> Member:
    return Member(nursery, PAIR)


# --- closes --------------------------------------------------------------------------------


async def test_a_member_prepares_when_all_is_closed(autojump_clock, member: Member) -> None:
    await member.has_committed(0, 1)
    member.close()
    await member.run()
    said = member.bench.network.of(Prepared)
    assert {m.digest for m in said} == {member.closing.prepared_digest}
    assert len(said) > 2


async def test_a_slow_data_node_is_waited_for_as_long_as_it_sends(
    autojump_clock, member: Member
) -> None:
    """A step may take hours; only silence is a fault."""
    member.start(member.run)
    for _ in range(10):
        await trio.sleep(LIMITS.step_stall_s * 0.7)
        await member.flow.on_forward(forward(WorkId(0, D, 0, 0), 1))
        member.flow.heard_at[D] = trio.current_time()
    assert member.closing._suspects == {}


async def test_a_data_node_that_falls_silent_is_named(autojump_clock, member: Member) -> None:
    with pytest.raises(PeerTimeout):
        await member.closing.run(ALONE)
    assert set(member.closing._suspects) == {D}
    assert trio.current_time() == pytest.approx(LIMITS.step_stall_s, rel=0.3)


async def test_forged_and_foreign_closes_change_nothing(autojump_clock, member: Member) -> None:
    member.closing.on_close(close_of(key=KEYS[9]), ALONE)
    forged = close_of(key=KEYS[9]).model_copy(update={"data_node": D})
    with pytest.raises(ProtocolViolation):
        member.closing.on_close(forged, ALONE)
    member.closing.on_close(close_of(path=(ME,)), ALONE)
    assert member.ledger.closes == {}


async def test_commits_that_were_lost_are_settled_by_the_close(
    autojump_clock, member: Member
) -> None:
    await member.has_committed(0)
    work = WorkId(0, D, 1, 0)
    await member.flow.on_forward(forward(work, 1))
    back = Backward(**work._asdict(), stage=1, path=(Z,))
    await member.flow.on_backward(Envelope(Z, back, (activation(1),)))
    member.close()
    await member.run()
    assert member.closing.prepared_digest is not None
    assert await member.counted() == [1, 1, 0, 0]


# --- ledgers -------------------------------------------------------------------------------


async def test_a_ledger_is_said_until_the_averaging_is_done(autojump_clock, of_two: Member) -> None:
    """One that broke with its session would cost the stage a member."""
    await of_two.has_committed(0, 1)
    of_two.close()
    of_two.start(of_two.closing.say_again)
    of_two.bench.network.gone.add(PEER)
    of_two.start(of_two.run)
    await trio.sleep(REPEAT_S * 5)
    assert of_two.bench.network.of(Ledger) == []
    of_two.bench.network.gone.clear()
    await trio.sleep(REPEAT_S * 5)
    ledgers, closes = (len(of_two.bench.network.of(kind, PEER)) for kind in (Ledger, StepClose))
    assert ledgers > 2
    assert closes > 2  # it may lack that
    of_two.hear_ledger()
    await trio.sleep(REPEAT_S * 5)
    assert len(of_two.bench.network.of(Ledger, PEER)) > ledgers + 2
    assert len(of_two.bench.network.of(StepClose, PEER)) == closes


async def test_ledgers_of_strangers_and_other_stages_are_not_kept(
    autojump_clock, of_two: Member
) -> None:
    for sender in (STRANGER, D, Z):
        of_two.hear_ledger(0, sender=sender)
    of_two.hear_ledger(0, stage=2)
    assert of_two.closing._ledgers == {}


async def test_a_member_without_a_ledger_is_named(autojump_clock, of_two: Member) -> None:
    await of_two.has_committed(0, 1)
    of_two.close()
    with pytest.raises(PeerTimeout):
        await of_two.closing.run(PAIR)
    assert set(of_two.closing._suspects) == {PEER}


async def test_the_second_holder_of_a_duplicate_names_itself(
    nursery, autojump_clock, of_two: Member
) -> None:
    await of_two.has_committed(0, 1)
    of_two.close()
    of_two.hear_ledger(1)
    of_two.start(of_two.run)  # I come first, so the other one leaves
    await trio.sleep(20)
    assert of_two.closing._suspects == {}
    second = Member(nursery, decision_of([(D,), (ME, PEERS[0]), (Z,)], quota=2))
    await second.has_committed(0, 1)
    second.close()
    second.hear_ledger(1, sender=PEERS[0])
    with pytest.raises(ProtocolViolation):
        await second.closing.run(second.decision)
    assert set(second.closing._suspects) == {ME}


# --- what is missing -----------------------------------------------------------------------


def answering(member: Member, *, missing: str = "", wrong: str = "") -> None:
    """Neighbours that answer each FetchBoundary."""
    send = member.bench.network.send

    async def send_and_answer(peer, message, tensors=()) -> None:
        await send(peer, message, tensors)
        if not isinstance(message, FetchBoundary):
            return
        fields = message.work._asdict() | {"direction": message.direction, "stage": 1}
        reply = Boundary.model_validate(fields)
        boundary = activation(message.slot)
        liar = torch.full_like(boundary, 7.0)
        member.repair.on_boundary(Envelope(STRANGER, reply, (liar,)))
        tensors = () if message.direction == missing else (boundary,)
        if message.direction == wrong:
            tensors = (liar,)
        member.repair.on_boundary(Envelope(peer, reply, tensors))

    member.bench.network.send = send_and_answer


async def test_what_nobody_has_is_computed_again_from_the_neighbours(
    autojump_clock, member: Member
) -> None:
    await member.has_committed(1)
    answering(member)
    member.close(path=(PEER, Z))  # the holder that died
    await member.run()
    assert await member.counted() == [1, 1, 0, 0]
    fetched = [(p, m.direction) for p, m, _ in member.bench.network.sent if m.kind[:5] == "fetch"]
    assert fetched == [(D, "activation"), (Z, "gradient")]
    assert member.closing.prepared_digest is not None


async def test_a_neighbour_without_the_tensor_means_another_drive(
    autojump_clock, member: Member
) -> None:
    await member.has_committed(1)
    answering(member, missing="gradient")
    member.close(path=(PEER, Z))
    member.start(member.run)
    await trio.sleep(10)
    (asked,) = member.bench.network.of(Redrive, D)
    assert (asked.slot, asked.stage) == (0, 1)
    again = WorkId(0, D, 0, 1)
    await member.flow.on_forward(forward(again, 1, purpose="redrive", target_stage=1, target=ME))
    back = Backward(**again._asdict(), stage=1, path=(Z,))
    await member.flow.on_backward(Envelope(Z, back, (activation(0),)))
    await trio.sleep(10)
    assert await member.counted() == [1, 1, 0, 0]
    assert member.closing.prepared_digest is not None


async def test_a_close_that_names_me_for_every_stage_sends_nothing_to_myself(
    autojump_clock, member: Member
) -> None:
    await member.has_committed(1)
    answering(member)
    member.close(path=(PEER, ME))
    member.start(member.run)
    await trio.sleep(20)
    assert len(member.bench.network.of(Redrive, D)) == 1


async def test_a_data_node_that_lost_its_own_sums_is_named(nursery, autojump_clock) -> None:
    bench = bench_of(nursery, KEYS[0], 0)
    ledger = StepLedger(D, 0, 0)
    flow = DataFlow(bench.ctx, ALONE, ledger)
    closing = Closing(bench.ctx, ledger, flow, Repair(bench.ctx, ledger, flow))
    closing.on_close(close_of(), ALONE)
    with pytest.raises(ProtocolViolation, match="lost"):
        await closing.run(ALONE)
    assert set(closing._suspects) == {D}


# --- failing -------------------------------------------------------------------------------


async def test_a_member_that_does_not_average_is_named(autojump_clock, of_two: Member) -> None:
    await of_two.has_committed(0, 1)
    of_two.close()
    of_two.hear_ledger()
    with pytest.raises(AveragingFailed):
        await of_two.closing.run(PAIR)
    assert set(of_two.closing._suspects) == {PEER}
    assert len(of_two.bench.network.of(ReducePart, PEER)) == 1


async def test_a_sum_of_the_wrong_number_of_microbatches_is_not_used(
    autojump_clock, of_two: Member
) -> None:
    await of_two.has_committed(0, 1)
    of_two.close()
    of_two.hear_ledger()
    averager = of_two.bench.ctx.averager

    async def total(round_, gradient, count):
        return gradient, count + 1

    averager.total = total
    with pytest.raises(ProtocolViolation, match="3 of 2"):
        await of_two.closing.run(PAIR)
    assert of_two.closing.prepared_digest is None


async def test_accusations_are_said_until_there_is_a_new_term(
    autojump_clock, member: Member
) -> None:
    """One that was lost with a session would leave the step open for ever."""
    with pytest.raises(PeerTimeout):
        await member.closing.run(ALONE)
    member.bench.network.gone.add(D)
    member.start(member.closing.accuse, ALONE, "why")
    await trio.sleep(REPEAT_S * 2.5)
    member.bench.network.gone.clear()
    await trio.sleep(REPEAT_S * 3)
    said = member.bench.network.of(Suspect, D)  # D is the authority here
    assert len(said) == 3
    assert {(m.peer, m.term) for m in said} == {(D, 1)}


async def test_a_failure_without_a_suspect_is_reported_too(autojump_clock, member: Member) -> None:
    member.start(member.closing.accuse, ALONE, "x" * 500)
    await trio.sleep(REPEAT_S / 2)
    (said,) = member.bench.network.of(Suspect)
    assert (said.peer, said.reason) == (ME, "x" * 200)


async def test_ledgers_of_invented_terms_take_no_memory(autojump_clock, of_two: Member) -> None:
    of_two.hear_ledger(0)
    for term in range(2, 1000):
        of_two.hear_ledger(0, term=term)
    of_two.hear_ledger(0, term=0)
    assert set(of_two.closing._ledgers) == {1, 999}


async def test_a_new_term_starts_with_no_suspects_and_no_past_ledgers(
    autojump_clock, of_two: Member
) -> None:
    await of_two.has_committed(0, 1)
    of_two.close()
    with pytest.raises(PeerTimeout):
        await of_two.closing.run(PAIR)
    of_two.decision = alone = decision_of([(D,), (ME,), (Z,)], term=2, quota=2)
    with trio.move_on_after(20):
        await of_two.closing.run(alone)
    assert of_two.closing._suspects == {}
    assert set(of_two.closing._ledgers) == {2}
    assert of_two.closing.prepared_digest is not None
