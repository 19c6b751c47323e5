"""An average that may be a mixture counts when all have it whole; then all take the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from step_kit import PEERS

from protocol.averaging import AgreedAverager, Round
from protocol.averaging.agreed import MAX_TRIES
from protocol.averaging.sentinels import ROW, SENTINELS, is_mean_of, num_rows, pack, unpack
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerGone, PeerTimeout, SidecarError
from protocol.keys import PeerId
from protocol.messages import AverageReport, Message, ReduceResult
from protocol.ports import Envelope, Tensor
from protocol.simulation.trace import Trace, TracingObserver

LIMITS = Deadlines()
LENGTH = 3000
NONCES = [bytes([k]) * 16 for k in range(1, 5)]
# What befalls a reducer's result: given own and everybody's matrices, what it reports as the mean.
Mishap = Callable[[Tensor, list[Tensor]], Tensor]


def round_of(num: int, *, step: int = 0, term: int = 1) -> Round:
    return Round(step, term, 0, 1, tuple(PEERS[:num]))


# --- sentinels -----------------------------------------------------------------------------


def packed_of(num: int, length: int = LENGTH) -> list[Tensor]:
    chance = torch.Generator().manual_seed(length)
    gradients = [torch.randn(length, generator=chance) for _ in range(num)]
    return [pack(g, k + 1, NONCES[k]) for k, g in enumerate(gradients)]


@settings(max_examples=10)
@given(length=st.integers(0, 3 * ROW), num=st.integers(1, 4))
def test_sum_and_count_come_back(length: int, num: int) -> None:
    packed = packed_of(num, length)
    assert packed[0].shape == (num_rows(length), ROW + SENTINELS)
    mean = torch.stack(packed).mean(0)
    assert is_mean_of(mean, NONCES[:num])
    total, count = unpack(mean, length, num)
    assert count == num * (num + 1) // 2
    torch.testing.assert_close(total, sum(p[:, :ROW].flatten()[:length] for p in packed))


@pytest.mark.parametrize("part", [128, 1000, 2**17])
@pytest.mark.parametrize("kept", ["own", "survivors", "nan"])
def test_a_mixture_is_found_wherever_its_parts_are_cut(part: int, kept: str) -> None:
    """Each part in turn is wrong, as hivemind cuts them: runs of the flat buffer."""
    packed = packed_of(4, 40 * ROW)
    mean = torch.stack(packed).mean(0)
    wrong = {
        "own": packed[0],
        "survivors": torch.stack(packed[:3]).mean(0),
        "nan": torch.full_like(mean, torch.nan),
    }[kept]
    for start in range(0, mean.numel(), part):
        mixture = mean.clone().flatten()
        mixture[start : start + part] = wrong.flatten()[start : start + part]
        holds_sentinels = any(
            i % (ROW + SENTINELS) >= ROW for i in range(start, min(start + part, mean.numel()))
        )
        assert is_mean_of(mixture.view_as(mean), NONCES) != holds_sentinels
        if part > ROW:  # as all of hivemind's are, but the last, which ends with sentinels
            assert holds_sentinels


def test_another_members_numbers_do_not_pass() -> None:
    mean = torch.stack(packed_of(2)).mean(0)
    assert not is_mean_of(mean, NONCES[:3])
    assert not is_mean_of(mean, [NONCES[0], NONCES[2]])


# --- rounds --------------------------------------------------------------------------------


@dataclass
class Wire:
    """Delivers after a moment; ``lost`` can neither send nor receive, ``frozen`` never answer."""

    averagers: dict[PeerId, AgreedAverager] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)
    frozen: set[PeerId] = field(default_factory=set)
    on_send: Callable[[PeerId, Message], None] = lambda sender, message: None

    async def carry(
        self, sender: PeerId, receiver: PeerId, message: Message, tensors: Sequence[Tensor]
    ) -> None:
        await trio.sleep(0.01)
        self.on_send(sender, message)
        if {sender, receiver} & self.lost:
            raise PeerGone("the line is dead")
        if {sender, receiver} & self.frozen:
            await trio.sleep(LIMITS.delivery_s)
            raise PeerTimeout("no answer")
        copies = tuple(tensor.clone() for tensor in tensors)
        self.averagers[receiver].deliver(Envelope(sender, message, copies))


@dataclass
class Side:
    """As much of a Network as the averager uses."""

    peer_id: PeerId
    wire: Wire

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await self.wire.carry(self.peer_id, peer, message, tensors)


@dataclass
class Club:
    """All reducers of a stage: a mean with everybody of the group, or what the script says."""

    mishaps: dict[tuple[int, int], Mishap] = field(default_factory=dict)  # (member, its try)
    tables: dict[tuple[str, int], dict[int, Tensor]] = field(default_factory=dict)
    changed: trio.Event = field(default_factory=trio.Event)
    absent: set[int] = field(default_factory=set)
    up: dict[int, str] = field(default_factory=dict)

    async def meet(self, group: str, index: int, values: Tensor, num: int) -> list[Tensor]:
        number = sum(name == group and index in table for (name, _), table in self.tables.items())
        table = self.tables.setdefault((group, number), {})
        table[index] = values.clone()
        self.changed.set()
        self.changed = trio.Event()
        with trio.move_on_after(LIMITS.matchmaking_s):
            while len(table) < num:
                await self.changed.wait()
            return [table[i] for i in sorted(table)]
        raise SidecarError("could not find a group")


@dataclass
class FakeReducer:
    """One member's; where it is changes when it is renewed."""

    index: int
    club: Club
    life: int = 0
    num_rounds: int = 0

    up_at: float = 0.0

    async def ready(self) -> tuple[str, ...]:
        while self.index in self.club.absent or trio.current_time() < self.up_at:
            await trio.sleep(1)
        self.club.up[self.index] = f"/{self.index}/{self.life}"
        return (self.club.up[self.index],)

    async def reduce(
        self, values: Tensor, group: str, peers: Sequence[str], num_members: int
    ) -> None:
        if not set(peers) <= set(self.club.up.values()):
            raise SidecarError("connection refused: that one is gone")
        number, self.num_rounds = self.num_rounds, self.num_rounds + 1
        everybody = await self.club.meet(group, self.index, values, num_members)
        mean = torch.stack(everybody).mean(0)
        mishap = self.club.mishaps.get((self.index, number), lambda own, all_: mean)
        # no two members of hivemind's have the same last bits
        values.copy_(mishap(values, everybody) * (1 + self.index * 2**-23))

    def renew(self) -> None:
        self.life += 1
        self.club.up.pop(self.index, None)
        self.up_at = trio.current_time() + 3 + self.index  # they do not start equally fast


@dataclass
class Stage:
    """The members of a stage and what came of a round."""

    num: int
    club: Club = field(default_factory=Club)
    wire: Wire = field(default_factory=Wire)
    totals: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    failures: dict[int, AveragingFailed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reducers = [FakeReducer(index, self.club) for index in range(self.num)]
        self.observers = [TracingObserver(str(k), Trace()) for k in range(self.num)]
        chance = torch.Generator().manual_seed(3)
        self.gradients = [torch.randn(LENGTH, generator=chance) for _ in range(self.num)]
        for index, reducer in enumerate(self.reducers):
            side = Side(PEERS[index], self.wire)
            self.wire.averagers[PEERS[index]] = AgreedAverager(
                side, LIMITS, reducer, self.observers[index]
            )

    async def take_part(self, index: int, round_: Round, after_s: float = 0.0) -> None:
        await trio.sleep(after_s)
        averager = self.wire.averagers[PEERS[index]]
        try:
            self.totals[index] = await averager.total(round_, self.gradients[index], index + 1)
        except AveragingFailed as error:
            self.failures[index] = error

    async def run(self, members: Sequence[int] | None = None, **changes: int) -> None:
        self.totals.clear()
        self.failures.clear()
        async with trio.open_nursery() as nursery:
            for index in range(self.num) if members is None else members:
                nursery.start_soon(self.take_part, index, round_of(self.num, **changes), index)

    def assert_agreed(self) -> None:
        assert not self.failures
        (result,) = {total.numpy().tobytes() for total, _ in self.totals.values()}
        assert {count for _, count in self.totals.values()} == {self.num * (self.num + 1) // 2}
        torch.testing.assert_close(self.totals[0][0], sum(self.gradients[: self.num]))
        assert len(result) == 4 * LENGTH


def survivors_only(own: Tensor, everybody: list[Tensor]) -> Tensor:
    """One part is the mean without the last member."""
    mixture = torch.stack(everybody).mean(0)
    mixture[0] = torch.stack(everybody[:-1]).mean(0)[0]
    return mixture


@pytest.mark.parametrize("num", [2, 3, 5])
async def test_members_take_the_same_bytes(autojump_clock, num: int) -> None:
    stage = Stage(num)
    for step in range(3):
        await stage.run(step=step)
        stage.assert_agreed()
    assert [reducer.life for reducer in stage.reducers] == [0] * num
    assert (
        len({group for group, _ in stage.club.tables}) == 1
    )  # one group for all steps: nothing was built anew


async def test_a_lone_member_asks_nobody() -> None:
    stage = Stage(1)
    await stage.run()
    assert torch.equal(stage.totals[0][0], stage.gradients[0])
    assert not stage.club.tables


async def test_a_mixture_is_not_taken_but_repeated(autojump_clock) -> None:
    stage = Stage(3, Club({(1, 0): survivors_only}))
    await stage.run()
    stage.assert_agreed()
    assert [reducer.life for reducer in stage.reducers] == [0, 1, 0]
    assert [reducer.num_rounds for reducer in stage.reducers] == [2, 2, 2]
    assert stage.observers[1].counts["errors"] == 1


async def test_a_reducer_that_fails_is_renewed(autojump_clock) -> None:
    def broken(own: Tensor, everybody: list[Tensor]) -> Tensor:
        raise SidecarError("p2pd is gone")

    stage = Stage(2, Club({(0, 0): broken}))
    await stage.run()
    stage.assert_agreed()
    assert [reducer.life for reducer in stage.reducers] == [1, 0]


async def test_a_member_that_never_had_a_whole_result_lets_nobody_have_one(autojump_clock) -> None:
    stage = Stage(3, Club({(2, k): survivors_only for k in range(MAX_TRIES)}))
    await stage.run()
    assert not stage.totals
    assert [stage.failures[k].missing for k in range(3)] == [{PEERS[2]}, {PEERS[2]}, set()]
    assert stage.reducers[2].num_rounds == MAX_TRIES


async def test_a_reducer_that_does_not_come_up_names_its_member(autojump_clock) -> None:
    stage = Stage(3)
    stage.club.absent.add(1)
    await stage.run()
    assert not stage.totals
    assert stage.failures[0].missing == stage.failures[2].missing == {PEERS[1]}


@pytest.mark.parametrize("fate", ["lost", "frozen"])
@pytest.mark.parametrize("phase", ["before", "ready", "complete", "agree"])
async def test_a_member_that_vanishes_in_any_phase_is_named(
    autojump_clock, fate: str, phase: str
) -> None:
    """Nobody has a result, and the next round goes on without it."""
    stage = Stage(3)
    victim = PEERS[2]

    def strike(sender: PeerId, message: Message) -> None:
        is_it = {
            "before": True,
            "ready": isinstance(message, AverageReport) and bool(message.addresses),
            "complete": isinstance(message, AverageReport) and message.is_complete,
            "agree": isinstance(message, ReduceResult),
        }[phase]
        if sender == victim and is_it:
            getattr(stage.wire, fate).add(victim)

    stage.wire.on_send = strike
    if phase == "before":
        getattr(stage.wire, fate).add(victim)
    with trio.move_on_after(LIMITS.averaging_s + 5):
        await stage.run()
    assert not {0, 1} & stage.totals.keys()
    # a survivor that gave up first may be missed by the other one: whom both name is gone
    assert stage.failures[0].missing & stage.failures[1].missing == {victim}
    stage.num = 2
    await stage.run(term=2)
    stage.assert_agreed()


async def test_a_frozen_member_is_found_out_in_its_silence(autojump_clock) -> None:
    stage = Stage(2)
    stage.wire.on_send = lambda sender, message: (
        stage.wire.frozen.add(PEERS[1]) if trio.current_time() - begun > 2 else None
    )
    stage.club.absent.add(1)
    begun = trio.current_time()
    await stage.run()
    assert stage.failures[0].missing == {PEERS[1]}
    assert trio.current_time() - begun < LIMITS.averaging_s + 1


async def test_a_shard_that_is_another_result_fails_the_round(autojump_clock) -> None:
    """The sentinels say that it is whole, but its numbers are others."""

    def poisoned(own: Tensor, everybody: list[Tensor]) -> Tensor:
        mean = torch.stack(everybody).mean(0)
        mean[:, :ROW] *= 1.01
        mean.view(-1)[LENGTH + (LENGTH // ROW) * SENTINELS] /= 1.01  # the count
        return mean

    stage = Stage(2, Club({(1, 0): poisoned}))
    await stage.run()
    assert not stage.totals
    assert stage.failures[0].missing == {PEERS[1]}
    assert stage.failures[1].missing == {PEERS[0]}  # each says it of the other


async def test_what_is_not_finite_is_so_for_everybody(autojump_clock) -> None:
    """Whether it may be used is decided later, by all alike."""
    stage = Stage(2)
    stage.gradients[0][5], stage.gradients[1][7] = torch.nan, torch.inf
    await stage.run()
    assert not stage.failures
    assert len({total.numpy().tobytes() for total, _ in stage.totals.values()}) == 1
    assert not stage.totals[0][0].isfinite().all()


async def test_a_cancelled_round_leaves_no_reducer_behind(autojump_clock) -> None:
    stage = Stage(2)
    with trio.move_on_after(LIMITS.matchmaking_s):
        async with trio.open_nursery() as nursery:
            stage.club.tables.clear()
            nursery.start_soon(stage.take_part, 0, round_of(2))
            await trio.sleep(0.1)
            report = AverageReport(
                step=0, term=1, stage=1, attempt=0, nonce=NONCES[1], addresses=("/1/0",)
            )
            stage.wire.averagers[PEERS[0]].deliver(Envelope(PEERS[1], report))
            await trio.sleep(0.1)
            nursery.cancel_scope.cancel()
    assert stage.reducers[0].life == 1


async def test_messages_of_strangers_and_of_other_rounds_change_nothing(autojump_clock) -> None:
    stage = Stage(2)
    averager = stage.wire.averagers[PEERS[0]]

    def report(**changes: int) -> AverageReport:
        fields = {
            "step": 0, "term": 1, "stage": 1, "attempt": 7, "nonce": NONCES[3], "addresses": ("/",)
        }  # fmt: skip
        return AverageReport.model_validate(fields | changes)

    shard = ReduceResult(step=0, term=1, stage=1, shard=0, num_microbatches=0)
    async with trio.open_nursery() as nursery:
        for index in range(2):
            nursery.start_soon(stage.take_part, index, round_of(2))
        await trio.testing.wait_all_tasks_blocked()
        averager.deliver(Envelope(PEERS[3], report()))
        averager.deliver(Envelope(PEERS[1], report(term=2)))
        averager.deliver(Envelope(PEERS[3], shard, (torch.zeros(LENGTH // 2),)))
        averager.deliver(Envelope(PEERS[1], shard, ()))
        with pytest.raises(AveragingFailed, match="wrong shape"):
            averager.deliver(Envelope(PEERS[1], shard, (torch.zeros(3),)))
    stage.assert_agreed()
