"""A holder's part in the flow, where messages meet jobs that wait for the worker."""

from __future__ import annotations

import pytest
import trio
from core_kit import LIMITS, Bench, activation, bench_of, forward
from step_kit import KEYS, PEERS, decision_of
from trio.testing import wait_all_tasks_blocked

from protocol.core.holder_flow import HolderFlow
from protocol.core.released import MOST_REMEMBERED
from protocol.messages import (
    Backward,
    Busy,
    Commit,
    Computed,
    Failed,
    Forward,
    HopLost,
    Resume,
    WorkId,
)
from protocol.ports import Envelope
from protocol.step.ledger import StepLedger

# Two data nodes, two holders of stage 1 (I am the first of them), two of stage 2.
D, E, ME, PEER, NEXT, OTHER = PEERS[:6]
STRANGER = PEERS[9]
ROSTER = [(D, E), (ME, PEER), (NEXT, OTHER)]
DECISION = decision_of(ROSTER)
TERM_2 = {"term": 2, "shares": DECISION.shares}


class Holder:
    """A flow under test and the tasks that its messages run in."""

    def __init__(self, nursery: trio.Nursery, capacity: int = 4) -> None:
        self.bench: Bench = bench_of(nursery, KEYS[2], 1, capacity=capacity)
        self.ledger = StepLedger(ME, 1, 0)
        self.flow = HolderFlow(self.bench.ctx, DECISION, self.ledger)
        self.bench.ctx.router.on_decision(DECISION, trio.current_time())
        self._nursery = nursery

    def start(self, what, *arguments: object) -> None:
        self._nursery.start_soon(what, *arguments)

    async def occupy_worker(self, seconds: float = 10) -> None:
        """Keep the worker busy for a while with a job that is at the front."""
        self.bench.ctx.runner._host.cost_s = dict.fromkeys(
            self.bench.ctx.runner._host.cost_s, seconds
        )
        self.start(self.bench.ctx.compute, "commit", lambda: None)
        await wait_all_tasks_blocked()

    async def passed_on(self, work: WorkId) -> None:
        """Compute a forward pass and hand it on to one who computes it."""
        await self.offer(forward(work, 1))
        message = Computed(**work._asdict(), stage=2)
        await self.flow.on_computed(message, self.taker())
        await wait_all_tasks_blocked()

    async def offer(self, envelope: Envelope) -> None:
        """Hear a Forward, for whose answer the flow then waits."""
        self.start(self.flow.on_forward, envelope)
        await trio.sleep(1.5)

    def taker(self) -> str:
        """To whom the last activation went."""
        return [p for p, m, _ in self.bench.network.sent if isinstance(m, Forward)][-1]

    async def hear_gradient(self, envelope: Envelope) -> None:
        """Hear a Backward, whose gradient the stage before takes at once."""
        self.start(self.flow.on_backward, envelope)
        await trio.sleep(2.5)

    def backward(self, work: WorkId, sender: str | None = None) -> Envelope:
        sender = sender or self.taker()
        message = Backward(**work._asdict(), stage=1, path=(sender,))
        return Envelope(sender, message, (activation(work.slot),))


@pytest.fixture
def holder(nursery, autojump_clock) -> Holder:
    return Holder(nursery)


def work(slot: int = 0, attempt: int = 0, data_node: str = D) -> WorkId:
    return WorkId(0, data_node, slot, attempt)


async def test_the_whole_way_forward_back_and_into_the_sums(autojump_clock, holder: Holder) -> None:
    await holder.passed_on(work())
    await holder.hear_gradient(holder.backward(work()))
    (back,) = holder.bench.network.of(Backward, D)
    assert back.stage == 0
    assert holder.flow.sums.has_pending(work())
    await holder.flow.on_commit(Commit(**work()._asdict(), path=(ME, NEXT)), D)
    assert holder.ledger.committed == {(D, 0): 0}
    assert holder.flow.num_open == 0
    assert holder.bench.state.gradient([D])[-4:].tolist() == [1, 0, 0, 0]


async def test_a_try_released_while_its_backward_waits_leaves_nothing(
    autojump_clock, holder: Holder
) -> None:
    """The worker frees first: the backward pass must not miss what was freed."""
    await holder.passed_on(work())
    await holder.occupy_worker()
    holder.start(holder.flow.on_backward, holder.backward(work()))
    await wait_all_tasks_blocked()
    await holder.flow.on_release(work())
    await trio.sleep(60)
    assert holder.bench.is_clean
    assert holder.bench.network.of(Backward) == []


async def test_a_try_released_while_its_forward_waits_leaves_nothing(
    autojump_clock, holder: Holder
) -> None:
    await holder.occupy_worker()
    holder.start(holder.flow.on_forward, forward(work(), 1))
    await wait_all_tasks_blocked()
    await holder.flow.on_release(work())
    await trio.sleep(60)
    assert holder.bench.is_clean
    assert holder.bench.network.of(Forward) == []


async def test_a_data_node_that_leaves_while_its_forward_waits_leaves_nothing(
    autojump_clock,
    holder: Holder,
) -> None:
    await holder.occupy_worker()
    holder.start(holder.flow.on_forward, forward(work(), 1))
    await wait_all_tasks_blocked()
    await holder.flow.on_decision(decision_of([(E,), *ROSTER[1:]], term=2))
    await trio.sleep(60)
    assert holder.bench.is_clean
    assert holder.flow.num_open == 0


async def test_the_same_gradient_twice_is_computed_once(autojump_clock, holder: Holder) -> None:
    await holder.passed_on(work())
    for _ in range(2):
        holder.start(holder.flow.on_backward, holder.backward(work()))
    await trio.sleep(10)
    assert len(holder.bench.network.of(Backward)) == 1


async def test_a_gradient_counts_from_the_next_hop_alone(autojump_clock, holder: Holder) -> None:
    await holder.passed_on(work())
    chosen = holder.taker()
    other = OTHER if chosen == NEXT else NEXT
    for sender in (other, D, STRANGER):
        await holder.hear_gradient(holder.backward(work(), sender))
    assert not holder.flow.sums.has_pending(work())


@pytest.mark.parametrize(
    ("path", "sender", "data_node"),
    [((), STRANGER, STRANGER), ((), PEER, PEER), ((), NEXT, NEXT), ((), D, STRANGER)],
)
async def test_nothing_is_computed_for_who_is_not_in_the_stage_below(
    autojump_clock, holder: Holder, path, sender, data_node
) -> None:
    await holder.offer(forward(work(data_node=data_node), 1, path, sender))
    assert holder.bench.network.of(Forward) == []
    assert holder.bench.is_clean


async def test_a_member_that_this_node_does_not_know_yet_is_asked_to_wait(
    autojump_clock, holder: Holder
) -> None:
    """It was let in by a decision that is on its way; silence would cost the whole flow."""
    early = forward(work(data_node=STRANGER), 1)
    await holder.offer(early)
    assert len(holder.bench.network.of(Busy, STRANGER)) == 1
    await holder.flow.on_decision(decision_of([(D, E, STRANGER), *ROSTER[1:]], term=2))
    await holder.offer(early)
    assert len(holder.bench.network.of(Forward)) == 1


async def test_a_slot_is_kept_free_for_what_is_issued_again(nursery, autojump_clock) -> None:
    holder = Holder(nursery, capacity=2)
    await holder.passed_on(work(0))
    await holder.offer(forward(work(2), 1))
    assert len(holder.bench.network.of(Busy, D)) == 1
    await holder.offer(forward(work(2, attempt=1), 1))
    assert len(holder.bench.network.of(Forward)) == 2
    await holder.offer(forward(work(1, attempt=1, data_node=E), 1))
    assert len(holder.bench.network.of(Busy, E)) == 1


async def test_a_busy_next_hop_is_passed_by(autojump_clock, holder: Holder) -> None:
    holder.bench.network.silent = {NEXT, OTHER}
    await holder.offer(forward(work(), 1))
    await holder.flow.on_busy(Busy(**work()._asdict(), stage=2), holder.taker())
    await wait_all_tasks_blocked()
    assert {p for p, m, _ in holder.bench.network.sent if isinstance(m, Forward)} == {NEXT, OTHER}


async def test_a_silent_next_hop_is_passed_by_and_still_believed(
    autojump_clock, holder: Holder
) -> None:
    holder.bench.network.silent = {NEXT, OTHER}
    await holder.offer(forward(work(), 1))
    silent = holder.taker()
    await trio.sleep(LIMITS.hop_s + 1)
    other = holder.taker()
    assert {silent, other} == {NEXT, OTHER}
    assert [m.is_repair for m in holder.bench.network.of(Forward)] == [False, True]
    await holder.hear_gradient(holder.backward(work(), silent))
    assert holder.flow.sums.has_pending(work())
    await holder.hear_gradient(holder.backward(work(), other))
    assert len(holder.bench.network.of(Backward)) == 1


async def test_offers_to_busy_hops_become_rarer(autojump_clock, holder: Holder) -> None:
    """Each of them carries the whole activation."""
    holder.bench.network.silent = {NEXT, OTHER}
    await holder.offer(forward(work(), 1))
    while trio.current_time() < 60:
        await holder.flow.on_busy(Busy(**work()._asdict(), stage=2), holder.taker())
        await trio.sleep(0.01)
    assert len(holder.bench.network.of(Forward)) < 140


async def test_two_tries_of_one_slot_commit_once_and_free_both_places(
    autojump_clock, holder: Holder
) -> None:
    for attempt in range(2):
        await holder.passed_on(work(attempt=attempt))
        await holder.hear_gradient(holder.backward(work(attempt=attempt)))
    assert holder.flow.num_open == 2
    for attempt in (1, 0, 1):
        await holder.flow.on_commit(Commit(**work(attempt=attempt)._asdict(), path=(ME, NEXT)), D)
    assert holder.ledger.committed == {(D, 0): 1}
    assert holder.flow.num_open == 0
    assert holder.bench.state.gradient([D])[-4:].tolist() == [1, 0, 0, 0]


async def test_a_late_try_of_a_committed_slot_is_let_go(autojump_clock, holder: Holder) -> None:
    """Else it would hold its place, and a few such holders would be full for the whole step."""
    for attempt in range(2):
        await holder.passed_on(work(attempt=attempt))
        await holder.hear_gradient(holder.backward(work(attempt=attempt)))
        await holder.flow.on_commit(Commit(**work(attempt=attempt)._asdict(), path=(ME, NEXT)), D)
    assert holder.ledger.committed == {(D, 0): 0}
    assert holder.flow.num_open == 0
    assert holder.bench.is_clean


async def test_a_commit_for_another_holder_changes_nothing(autojump_clock, holder: Holder) -> None:
    await holder.passed_on(work())
    await holder.hear_gradient(holder.backward(work()))
    await holder.flow.on_commit(Commit(**work()._asdict(), path=(PEER, NEXT)), D)
    assert holder.ledger.committed == {}


async def test_a_lost_next_hop_is_replaced_when_the_data_node_says_where_to_resume(
    autojump_clock, holder: Holder
) -> None:
    await holder.passed_on(work())
    chosen = holder.taker()
    await holder.flow.on_peer_down(chosen)
    (lost,) = holder.bench.network.of(HopLost, D)
    assert (lost.work, lost.stage, lost.peer, lost.before) == (work(), 2, chosen, ME)
    resume = Resume(**work()._asdict(), stage=2, peer=chosen, route=())
    for _ in range(2):  # the second says nothing new
        holder.start(holder.flow.on_resume, resume)
        await wait_all_tasks_blocked()
    assert holder.taker() != chosen
    assert [m.is_repair for m in holder.bench.network.of(Forward)] == [False, True]


async def test_a_known_try_is_not_computed_again_and_its_gradient_goes_to_the_new_branch(
    nursery, autojump_clock
) -> None:
    holder = Holder(nursery)
    await holder.passed_on(work())
    await holder.hear_gradient(holder.backward(work()))
    before = holder.bench.ctx.runner.busy_s
    await holder.offer(forward(work(), 1, is_repair=True))
    assert len(holder.bench.network.of(Backward, D)) == 2
    assert holder.bench.ctx.runner.busy_s == before


async def test_who_is_not_on_the_path_that_counts_is_told_and_forgets(
    autojump_clock, holder: Holder
) -> None:
    await holder.passed_on(work())
    await holder.hear_gradient(holder.backward(work()))
    await holder.flow.on_commit(Commit(**work()._asdict(), path=(PEER, OTHER)), D)
    assert holder.flow.num_open == 0
    assert holder.bench.is_clean


async def test_what_was_released_is_remembered_within_bounds(
    autojump_clock, holder: Holder
) -> None:
    for slot in range(2 * MOST_REMEMBERED):
        await holder.flow.on_release(work(slot))
    assert len(holder.flow._released) == MOST_REMEMBERED
    assert holder.flow._works == {}


async def test_nobody_is_told_of_a_hop_that_went_after_its_gradient_came(
    autojump_clock, holder: Holder
) -> None:
    await holder.passed_on(work())
    envelope = holder.backward(work())
    await holder.hear_gradient(envelope)
    await holder.flow.on_peer_down(envelope.sender)
    assert holder.bench.network.of(Failed) == holder.bench.network.of(HopLost) == []
    assert holder.flow.sums.has_pending(work())


# --- redrives ------------------------------------------------------------------------------


async def redriven(holder: Holder, target: str = ME) -> None:
    again = work(attempt=1)
    await holder.offer(forward(again, 1, purpose="redrive", target_stage=1, target=target))
    await holder.hear_gradient(holder.backward(again))


async def test_a_redrive_goes_into_the_sums_of_who_asked_for_it(
    autojump_clock, holder: Holder
) -> None:
    arrived = holder.flow.sums.redriven[D, 0] = trio.Event()
    await redriven(holder)
    assert arrived.is_set()
    assert holder.ledger.committed == {(D, 0): 1}
    assert holder.bench.network.of(Backward) == []  # the way back ends here


async def test_a_redrive_that_nobody_waits_for_any_more_is_dropped(
    autojump_clock, holder: Holder
) -> None:
    """A new term may have given the slot to another holder."""
    holder.flow.sums.redriven[D, 0] = trio.Event()
    again = work(attempt=1)
    await holder.offer(forward(again, 1, purpose="redrive", target_stage=1, target=ME))
    await holder.occupy_worker()
    holder.start(holder.flow.on_backward, holder.backward(again))
    await wait_all_tasks_blocked()
    holder.flow.sums.redriven.clear()
    await trio.sleep(60)
    assert holder.ledger.committed == {}
    assert holder.bench.is_clean


async def test_a_redrive_for_another_holder_of_the_stage_leaves_nothing(
    autojump_clock, holder: Holder
) -> None:
    holder.flow.sums.redriven[D, 0] = trio.Event()
    await redriven(holder, target=PEER)
    assert holder.ledger.committed == {}
    assert holder.bench.is_clean


# --- forward only --------------------------------------------------------------------------


async def test_forward_only_work_takes_no_memory_when_it_is_over(
    autojump_clock, holder: Holder
) -> None:
    for slot in range(5):
        only = work(2**41 + slot)
        await holder.offer(forward(only, 1, purpose="eval"))
        await holder.flow.on_release(only)
    assert holder.flow._works == {}
    assert holder.bench.is_clean


async def test_a_branch_that_comes_after_another_came_home_is_not_computed(
    autojump_clock, holder: Holder
) -> None:
    """Whoever sent it is told what it waits for; a repair that the data node wants is computed."""
    home = Computed(**work()._asdict(), stage=0)
    await holder.flow.on_computed(home, E)
    assert work() not in holder.flow._home
    await holder.flow.on_computed(home, D)
    await holder.offer(forward(work(), 1))
    assert holder.flow.num_open == 0
    assert holder.bench.network.of(Computed, D) == [Computed(**work()._asdict(), stage=1)]
    assert holder.bench.network.of(Forward) == []
    await holder.offer(forward(work(), 1, is_repair=True))
    assert holder.flow.num_open == 1
    assert len(holder.bench.network.of(Forward)) == 1


async def test_a_data_node_cannot_fill_the_memory_with_what_came_home(
    autojump_clock, holder: Holder
) -> None:
    for attempt in range(MOST_REMEMBERED + 10):
        home = Computed(**work(attempt=attempt)._asdict(), stage=0)
        await holder.flow.on_computed(home, D)
    assert len(holder.flow._home) == MOST_REMEMBERED
