"""Exact averaging: the same bytes on all members, or nobody has a sum and the missing are named."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kit import PEERS

from protocol.averaging import ExactAverager, Round
from protocol.averaging.exact import ExactReduce, shard_bounds
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerGone
from protocol.keys import PeerId
from protocol.messages import Message, ReducePart, ReduceResult
from protocol.ports import Envelope, Tensor

LIMITS = Deadlines()


def round_of(
    num: int, *, step: int = 0, term: int = 1, stage: int = 1, grace_s: float = 0
) -> Round:
    return Round(step, term, 0, stage, tuple(PEERS[:num]), grace_s)


def gradients_of(num: int, length: int, seed: int) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=chance) for _ in range(num)]


def plain_sum(parts: Sequence[Tensor]) -> Tensor:
    """In PeerID order, in fp32."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def rule_of(num: int, index: int, gradient: Tensor, count: int = 1) -> ExactReduce:
    return ExactReduce(round_of(num), PEERS[index], (gradient,), count, len(gradient))


# --- the rule ------------------------------------------------------------------------------


@given(length=st.integers(0, 50), num=st.integers(1, 9))
def test_shards_cover_everything_evenly(length: int, num: int) -> None:
    bounds = shard_bounds(length, num)
    assert [i for start, end in bounds for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=60)
@given(num=st.integers(1, 7), length=st.integers(0, 40), seed=st.integers(0, 2**20))
def test_all_members_have_the_same_bytes_whatever_arrives_first(
    num: int, length: int, seed: int
) -> None:
    gradients, chance = gradients_of(num, length, seed), Random(seed)
    rules = [rule_of(num, i, g, i) for i, g in enumerate(gradients)]
    parts = [(a, b) for a in rules for b in rules if a is not b]
    chance.shuffle(parts)
    for sender, receiver in parts:
        (part,) = sender.parts_of(receiver.index)
        receiver.on_part(sender.index, part, sender.num_microbatches)
    shards = [(rule.index, rule.reduced()) for rule in rules]
    for rule in chance.sample(rules, num):
        for index, shard in chance.sample(shards, num):
            rule.on_result(index, shard)
    expected = plain_sum(gradients)
    for rule in rules:
        assert rule.complete().numpy().tobytes() == expected.numpy().tobytes()
        assert rule.total_count == sum(range(num))
        assert rule.missing() == frozenset()


def test_what_came_first_stands() -> None:
    rule = rule_of(2, 0, torch.zeros(4))
    rule.on_part(1, torch.ones(2), 1)
    rule.on_part(1, torch.full((2,), 9.0), 9)
    assert rule.reduced().tolist() == [1.0, 1.0]
    assert rule.total_count == 2


def test_it_says_who_owes_a_part_or_a_result() -> None:
    rule = rule_of(4, 0, torch.zeros(8))
    rule.on_part(1, torch.zeros(2), 1)
    rule.on_part(2, torch.zeros(2), 1)
    rule.on_result(1, torch.zeros(2))
    assert rule.missing() == {PEERS[2], PEERS[3]}
    assert rule.reduced() is None
    assert rule.complete() is None


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).double()])
def test_a_shard_of_the_wrong_shape_is_refused(wrong: Tensor) -> None:
    rule = rule_of(2, 0, torch.zeros(4))
    with pytest.raises(AveragingFailed, match="wrong shape"):
        rule.on_part(1, wrong, 1)
    with pytest.raises(AveragingFailed, match="wrong shape"):
        rule.on_result(1, wrong)


# --- over the data plane -------------------------------------------------------------------


class Wire:
    """Delivers after a random pause; ``lost`` names who can neither send nor receive."""

    def __init__(self, seed: int) -> None:
        self.averagers: dict[PeerId, ExactAverager] = {}
        self.lost: set[PeerId] = set()
        self.num_bytes = 0
        self._chance = Random(seed)

    def member(self, index: int, most_parts: int = 1) -> ExactAverager:
        me = PEERS[index]
        self.averagers[me] = ExactAverager(Side(me, self), LIMITS, most_parts=most_parts)
        return self.averagers[me]

    async def carry(
        self, sender: PeerId, receiver: PeerId, message: Message, tensors: Sequence[Tensor]
    ) -> None:
        await trio.sleep(self._chance.random())
        if sender in self.lost or receiver in self.lost:
            raise PeerGone("the line is dead")
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        copies = tuple(tensor.clone() for tensor in tensors)
        self.averagers[receiver].deliver(Envelope(sender, message, copies))


class Side:
    """As much of a Network as the averager uses."""

    def __init__(self, peer_id: PeerId, wire: Wire) -> None:
        self.peer_id, self._wire = peer_id, wire

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await self._wire.carry(self.peer_id, peer, message, tensors)


@pytest.mark.parametrize("num", [1, 2, 3, 5])
async def test_a_round_over_the_network(autojump_clock, num: int) -> None:
    wire, length = Wire(num), 7 * num + 1
    averagers = [wire.member(i) for i in range(num)]
    gradients, totals = gradients_of(num, length, 1), {}

    async def take_part(index: int) -> None:
        await trio.sleep(index)  # parts arrive before a member has begun
        totals[index] = await averagers[index].total(round_of(num), gradients[index], index + 1)

    async with trio.open_nursery() as nursery:
        for index in range(num):
            nursery.start_soon(take_part, index)
    expected = plain_sum(gradients).numpy().tobytes()
    assert {total.numpy().tobytes() for total, _ in totals.values()} == {expected}
    assert {count for _, count in totals.values()} == {num * (num + 1) // 2}
    assert wire.num_bytes == 2 * (num - 1) * 4 * length


async def failure(averager: ExactAverager, round_: Round, gradient: Tensor) -> AveragingFailed:
    with pytest.raises(AveragingFailed) as caught:
        await averager.total(round_, gradient, 1)
    return caught.value


async def test_a_dead_member_is_named_at_once_and_a_silent_one_at_the_deadline(
    autojump_clock,
) -> None:
    wire = Wire(0)
    first, _ = wire.member(0), wire.member(1)
    error = await failure(first, round_of(2), torch.zeros(4))
    assert error.missing == {PEERS[1]}
    assert trio.current_time() == pytest.approx(LIMITS.averaging_s)
    wire.lost.add(PEERS[1])
    started = trio.current_time()
    error = await failure(first, round_of(2, term=2), torch.zeros(4))
    assert error.missing == {PEERS[1]}
    assert trio.current_time() < started + 1


class LastWord:
    """A network whose peer is lost at the very moment at which the round is cancelled."""

    def __init__(self) -> None:
        self.peer_id, self.scope = PEERS[0], trio.CancelScope()

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        self.scope.cancel()
        raise PeerGone("lost")


async def test_a_fault_at_the_moment_of_cancelling_does_not_escape() -> None:
    """It would come out as a group, which no caller takes for a peer's fault."""
    network = LastWord()
    averager = ExactAverager(network, LIMITS)
    with network.scope:
        await averager.total(round_of(2), torch.zeros(4), 1)
    assert network.scope.cancelled_caught


async def test_members_that_recompute_get_more_time(autojump_clock) -> None:
    wire = Wire(0)
    first, second = wire.member(0), wire.member(1)
    async with trio.open_nursery() as nursery:
        late = round_of(2, grace_s=100.0)
        nursery.start_soon(first.total, late, torch.ones(4), 1)
        await trio.sleep(LIMITS.averaging_s + 50)
        total, count = await second.total(late, torch.ones(4), 1)
    assert (total.tolist(), count) == ([2.0] * 4, 2)


async def test_messages_of_past_rounds_and_of_strangers_change_nothing(autojump_clock) -> None:
    wire = Wire(0)
    first, second = wire.member(0), wire.member(1)

    def part(**changes: int) -> ReducePart:
        fields = {"step": 0, "term": 2, "stage": 1, "shard": 0, "place": 1, "num_microbatches": 9}
        return ReducePart.model_validate(fields | changes)

    wrong = (torch.full((2,), 9.0),)
    nines = [
        Envelope(PEERS[1], part(term=1), wrong),
        Envelope(PEERS[1], part(stage=2), wrong),
        Envelope(PEERS[1], part(epoch=1), wrong),
        Envelope(PEERS[1], part(shard=1), wrong),
        Envelope(PEERS[1], part(place=0), wrong),  # mine
        Envelope(PEERS[1], part(place=2), wrong),
        Envelope(PEERS[1], part(), ()),
        Envelope(PEERS[7], part(), wrong),
        # a result comes from the owner of its shard alone
        Envelope(
            PEERS[0],
            ReduceResult(step=0, term=2, stage=1, shard=1, num_microbatches=9),
            wrong,
        ),
    ]
    await failure(first, round_of(2), torch.zeros(4))  # term 1 is past for it now
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first.total, round_of(2, term=2), torch.ones(4), 1)
        await trio.testing.wait_all_tasks_blocked()
        for envelope in nines:
            first.deliver(envelope)
        total, count = await second.total(round_of(2, term=2), torch.ones(4), 1)
    assert (total.tolist(), count) == ([2.0] * 4, 2)


async def test_an_early_part_of_the_wrong_shape_is_owed_still(autojump_clock) -> None:
    """The sender is at fault, not the member that reads it: the round names the sender."""
    wire = Wire(0)
    first, _ = wire.member(0), wire.member(1)
    message = ReducePart(step=0, term=1, stage=1, shard=0, place=1, num_microbatches=1)
    first.deliver(Envelope(PEERS[1], message, (torch.zeros(3),)))
    error = await failure(first, round_of(2), torch.zeros(4))
    assert error.missing == {PEERS[1]}


async def test_early_messages_of_one_sender_do_not_pile_up(autojump_clock) -> None:
    wire = Wire(0)
    first = wire.member(0)
    for term in range(1, 100):
        message = ReducePart(step=0, term=term, stage=1, shard=0, num_microbatches=1)
        first.deliver(Envelope(PEERS[1], message, (torch.zeros(2),)))
    assert len(first._early[PEERS[1]]) == 1


# --- sums by slot --------------------------------------------------------------------------


async def total_by_slot(holders: Sequence[int], gradients: Sequence[Tensor], seed: int) -> bytes:
    """The bytes that all members get when ``holders[slot]`` computed each slot."""
    num, wire, totals = 1 + max(holders), Wire(seed), []
    round_ = Round(0, 1, 0, 1, tuple(PEERS[:num]), sources=tuple(PEERS[h] for h in holders))

    async def take_part(index: int) -> None:
        mine = [g for g, holder in zip(gradients, holders, strict=True) if holder == index]
        averager = wire.member(index, most_parts=len(holders))
        await trio.sleep(seed * index % 3)
        totals.append(await averager.total_in_order(round_, mine, len(gradients[0])))

    async with trio.open_nursery() as nursery:
        for index in range(num):
            nursery.start_soon(take_part, index)
            await trio.testing.wait_all_tasks_blocked()
    assert {count for _, count in totals} == {len(holders)}
    (result,) = {total.numpy().tobytes() for total, _ in totals}
    return result


async def test_a_sum_by_slot_depends_neither_on_holders_nor_on_timing(autojump_clock) -> None:
    gradients = gradients_of(7, 23, 5)
    expected = plain_sum(gradients).numpy().tobytes()
    backwards = plain_sum(gradients[::-1]).numpy().tobytes()
    assert expected != backwards  # the order does matter to the bits
    deals = [[0] * 7, [0, 1, 0, 1, 0, 1, 1], [2, 2, 1, 0, 1, 0, 0], [0, 0, 2, 0, 0, 0, 0]]
    for seed, holders in enumerate(deals):
        assert await total_by_slot(holders, gradients, seed) == expected


async def test_who_owes_a_slots_part_is_named(autojump_clock) -> None:
    wire = Wire(0)
    first, _ = wire.member(0), wire.member(1)
    members = tuple(PEERS[:2])
    round_ = Round(0, 1, 0, 1, members, sources=(PEERS[0], PEERS[1], PEERS[0]))
    with pytest.raises(AveragingFailed) as caught:
        await first.total_in_order(round_, [torch.zeros(4), torch.zeros(4)], 4)
    assert caught.value.missing == {PEERS[1]}


async def test_early_parts_are_kept_up_to_what_a_round_has(autojump_clock) -> None:
    wire = Wire(0)
    first = wire.member(0, most_parts=3)
    for place in range(100):
        message = ReducePart(step=0, term=1, stage=1, shard=0, place=place, num_microbatches=1)
        first.deliver(Envelope(PEERS[1], message, (torch.zeros(2),)))
    assert len(first._early[PEERS[1]]) == 3 + 1
