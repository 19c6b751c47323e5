"""A data node's part in the flow: every slot comes home once, whatever becomes of its tries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from core_kit import Bench, activation, bench_of, forward
from step_kit import KEYS, PEERS, decision_of
from trio.testing import wait_all_tasks_blocked

from protocol.core.data_flow import DataFlow
from protocol.core.forward_only import ForwardOnly
from protocol.messages import (
    Backward,
    Commit,
    Computed,
    Failed,
    Forward,
    HopLost,
    Redrive,
    Release,
    Resume,
    StepClose,
    WorkId,
)
from protocol.ports import Envelope
from protocol.simulation.host import FREE
from protocol.step.ledger import StepLedger

ME, X, Y, Z, V = PEERS[:5]
STRANGER = PEERS[9]
ROSTER = [(ME,), (X, Y), (Z, V)]
ONE_SLOT = decision_of(ROSTER, quota=1)


class DataNode:
    """A flow under test, and the holders' side of it."""

    def __init__(self, nursery: trio.Nursery, decision=ONE_SLOT) -> None:
        self.bench: Bench = bench_of(nursery, KEYS[0], 0)
        self.ledger = StepLedger(ME, 0, 0)
        self.flow = DataFlow(self.bench.ctx, decision, self.ledger)
        self.bench.network.hear = self.flow.on_computed
        self.bench.ctx.router.on_decision(decision, trio.current_time())
        self.closes: list[StepClose] = []
        self._nursery = nursery

    def start(self, what: Callable[..., object], *arguments: object) -> None:
        self._nursery.start_soon(what, *arguments)

    async def drive(self) -> Forward:
        """Begin, and return the first Forward."""
        self.start(self.flow.drive, self.closes.append)
        return await self.next_forward(0)

    async def next_forward(self, number: int) -> Forward:
        """Wait for the Forward with this number."""
        with trio.fail_after(100):
            while len(self.bench.network.of(Forward)) <= number:
                await trio.sleep(0.1)
        return self.bench.network.of(Forward)[number]

    def hops(self) -> list[str]:
        """Who was sent an activation, in order."""
        return [
            peer for peer, message, _ in self.bench.network.sent if isinstance(message, Forward)
        ]

    def last_hop(self, message: Forward, path=()) -> Envelope:
        """What comes back from the last stage; by default from where it was sent last."""
        path = path or (self.hops()[-1], Z)
        return forward(message.work, 3, path, purpose=message.purpose)

    def gradient(self, message: Forward) -> Envelope:
        path = (self.hops()[-1], Z)
        back = Backward(**message.work._asdict(), stage=0, path=path)
        return Envelope(path[0], back, (activation(message.slot),))

    async def bring_home(self, message: Forward) -> None:
        await self.flow.on_forward(self.last_hop(message))
        await self.flow.on_backward(self.gradient(message))


@pytest.fixture
def node(nursery, autojump_clock) -> DataNode:
    return DataNode(nursery)


def failed(work: WorkId, stage: int = 1) -> Failed:
    return Failed(**work._asdict(), stage=stage, reason="test")


async def test_a_slot_comes_home_and_the_close_lists_it(autojump_clock, node: DataNode) -> None:
    await node.bring_home(await node.drive())
    await trio.sleep(10)
    (close,) = node.closes
    assert [(e.slot, e.attempt, e.path) for e in close.entries] == [(0, 0, (X, Z))]
    assert {p for p, m, _ in node.bench.network.sent if isinstance(m, Commit)} == {X, Z}
    assert node.bench.state.gradient([ME])[-4:].tolist() == [1, 0, 0, 0]
    assert node.bench.ctx.router._loads._peers[X].outstanding == 0


async def test_a_try_that_fails_is_issued_again_with_the_same_content(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    node.flow.on_failed(failed(first.work), X)
    second = await node.next_forward(1)
    assert second.work == first.work._replace(attempt=1)
    tensors = [t for _, m, t in node.bench.network.sent if isinstance(m, Forward)]
    assert tensors[0][0].equal(tensors[1][0])
    assert {r.work for r in node.bench.network.of(Release)} == {first.work}
    await node.bring_home(second)
    await trio.sleep(10)
    assert [entry.attempt for entry in node.closes[0].entries] == [1]
    assert node.flow.num_reissued == 1


async def occupied(node: DataNode) -> None:
    """Keep the worker busy, so that jobs wait behind those that free memory."""
    node.start(node.bench.ctx.compute, "commit", lambda: None)
    await wait_all_tasks_blocked()


async def test_a_try_that_fails_while_its_loss_waits_leaves_nothing(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    await occupied(node)
    node.start(node.flow.on_forward, node.last_hop(first))
    await wait_all_tasks_blocked()
    node.flow.on_failed(failed(first.work), X)
    second = await node.next_forward(1)
    assert node.bench.network.of(Backward) == []
    await node.bring_home(second)
    await trio.sleep(10)
    assert node.bench.is_clean


async def test_a_try_that_fails_while_its_last_gradient_waits_leaves_nothing(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    await node.flow.on_forward(node.last_hop(first))
    await occupied(node)
    node.start(node.flow.on_backward, node.gradient(first))
    await wait_all_tasks_blocked()
    node.flow.on_failed(failed(first.work), X)
    await node.bring_home(await node.next_forward(1))
    await trio.sleep(10)
    assert len(node.closes) == 1
    assert node.bench.is_clean


async def test_the_same_gradient_twice_counts_once(autojump_clock, node: DataNode) -> None:
    first = await node.drive()
    await node.flow.on_forward(node.last_hop(first))
    node.bench.ctx.runner._host.cost_s = FREE  # both jobs run before the loop hears of the first
    for _ in range(2):
        node.start(node.flow.on_backward, node.gradient(first))
    await trio.sleep(10)
    assert node.bench.state.gradient([ME])[-4:].tolist() == [1, 0, 0, 0]


async def test_only_a_holder_of_that_stage_says_that_a_try_failed(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    for sender, stage in ((STRANGER, 1), (X, 2), (Z, 1), (ME, 0), (STRANGER, 0)):
        node.flow.on_failed(failed(first.work, stage), sender)
    await trio.sleep(10)
    assert len(node.bench.network.of(Forward)) == 1


@pytest.mark.parametrize("path", [(X,), (X, Y), (Z, X), (STRANGER, Z), (X, STRANGER), (X, V)])
async def test_an_activation_counts_along_a_path_of_the_roster_from_its_last_hop(
    autojump_clock, node: DataNode, path
) -> None:
    first = await node.drive()
    envelope = node.last_hop(first, path)
    await node.flow.on_forward(Envelope(Z, envelope.message, envelope.tensors))
    assert node.bench.network.of(Backward) == []


async def test_a_first_hop_that_swallows_a_try_is_barred(autojump_clock, node: DataNode) -> None:
    """It gives no sign of life, and must not look idle then; another one gets the same try."""
    node.bench.network.silent = {X, Y}
    await node.drive()
    (swallower,) = node.hops()
    await trio.sleep(node.bench.ctx.deadlines.hop_s)
    again = await node.next_forward(1)
    assert (again.work.attempt, again.is_repair) == (0, True)
    assert node.hops()[1] != swallower
    assert node.bench.ctx.router._loads._peers[swallower].outstanding == 0


async def test_a_try_that_never_comes_back_is_issued_again(autojump_clock, node: DataNode) -> None:
    await node.drive()
    await trio.sleep(node.bench.ctx.deadlines.flow_s)
    assert (await node.next_forward(1)).work.attempt == 1


@pytest.mark.parametrize("is_home", [False, True])
async def test_a_first_hop_that_is_gone_is_replaced(
    autojump_clock, node: DataNode, is_home: bool
) -> None:
    """If the activation came home, those behind the lost one need not compute it again."""
    first = await node.drive()
    (lost,) = node.hops()
    (other,) = {X, Y} - {lost}
    if is_home:
        await node.flow.on_forward(node.last_hop(first, (lost, Z)))
    node.start(node.flow.on_peer_down, lost)
    again = await node.next_forward(1)
    assert (again.work, again.is_repair) == (first.work, True)
    assert again.route == ((Z,) if is_home else ())
    assert node.hops() == [lost, other]


async def test_a_holder_before_the_lost_one_is_told_where_to_resume(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    (hop,) = node.hops()
    await node.flow.on_forward(node.last_hop(first, (hop, Z)))
    lost = HopLost(**first.work._asdict(), stage=2, peer=Z, before=hop)
    await node.flow.on_hop_lost(lost, hop)
    (resume,) = node.bench.network.of(Resume, hop)
    assert (resume.stage, resume.peer, resume.route) == (2, Z, ())


async def test_who_races_in_vain_is_told_so_when_another_branch_came_home(
    autojump_clock, node: DataNode
) -> None:
    """Also to those that no branch has reached yet, and who counts in the end to all."""
    node.bench.network.silent = {X, Y}
    first = await node.drive()
    await trio.sleep(node.bench.ctx.deadlines.hop_s)
    await node.next_forward(1)
    slow, replacement = node.hops()
    home = node.last_hop(first, (replacement, Z))
    node.start(node.flow.on_forward, home)
    await trio.sleep(2)
    told = {p for p, m, _ in node.bench.network.sent if isinstance(m, Computed)}
    assert told == {slow, V}
    assert {m.stage for m in node.bench.network.of(Computed)} == {0}
    await node.flow.on_backward(node.gradient(first))
    await trio.sleep(5)
    assert {p for p, m, _ in node.bench.network.sent if isinstance(m, Commit)} == {X, Y, Z, V}


async def test_nobody_suspects_the_first_hop_once_the_activation_is_home(
    autojump_clock, node: DataNode
) -> None:
    node.bench.network.silent = {X, Y}
    first = await node.drive()
    node.start(node.flow.on_forward, node.last_hop(first))
    await trio.sleep(node.bench.ctx.deadlines.hop_s + 1)
    assert len(node.hops()) == 1
    assert node.bench.network.of(Computed) == []


@pytest.mark.parametrize(("sender", "before"), [(STRANGER, STRANGER), (Z, X), (X, Y), (ME, X)])
async def test_only_neighbours_say_that_a_hop_is_lost(
    autojump_clock, node: DataNode, sender, before
) -> None:
    first = await node.drive()
    await node.flow.on_forward(node.last_hop(first, (node.hops()[0], Z)))
    lost = HopLost(**first.work._asdict(), stage=2, peer=Z, before=before)
    await node.flow.on_hop_lost(lost, sender)
    assert node.bench.network.of(Resume) == []


async def test_a_committed_slot_is_driven_again_for_who_lost_it(
    autojump_clock, node: DataNode
) -> None:
    first = await node.drive()
    await node.bring_home(first)
    await trio.sleep(10)
    redrive = Redrive(**first.work._asdict(), stage=2)
    node.start(node.flow.on_redrive, redrive, Z)
    again = await node.next_forward(1)
    assert (again.purpose, again.target, again.target_stage) == ("redrive", Z, 2)
    await node.flow.on_forward(node.last_hop(again))
    await trio.sleep(10)
    assert node.bench.state.gradient([ME])[-4:].tolist() == [1, 0, 0, 0]
    assert node.bench.is_clean


@pytest.mark.parametrize(
    ("slot", "stage", "sender"), [(3, 2, Z), (0, 2, Z), (0, 1, Z), (0, 2, STRANGER), (0, 0, ME)]
)
async def test_nothing_is_driven_again_that_was_not_committed_or_for_a_stranger(
    autojump_clock, node: DataNode, slot: int, stage: int, sender
) -> None:
    first = await node.drive()
    if (slot, stage, sender) != (0, 2, Z):  # which is not committed yet
        await node.bring_home(first)
        await trio.sleep(10)
    work = first.work._replace(slot=slot)
    await node.flow.on_redrive(Redrive(**work._asdict(), stage=stage), sender)
    assert len(node.bench.network.of(Forward)) == 1


async def test_slots_dealt_while_it_validates_are_noticed(
    nursery, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data node without a share gets all slots when the others leave."""

    async def validate(self: ForwardOnly) -> None:
        await trio.sleep(5)

    monkeypatch.setattr(ForwardOnly, "validate_if_due", validate)
    node = DataNode(nursery, decision_of([(ME, PEERS[8]), (X, Y), (Z, V)], shares=()))
    node.start(node.flow.drive, node.closes.append)
    await trio.sleep(1)
    await node.flow.on_decision(decision_of(ROSTER, term=2, quota=1))
    await node.bring_home(await node.next_forward(0))
    await trio.sleep(20)
    assert len(node.closes) == 1
