"""State transfer over the simulated network: resumed, checked, and taken from who was asked."""

from __future__ import annotations

from random import Random

import pytest
import torch
import trio
from core_kit import LIMITS
from step_kit import PEERS
from transfer_kit import CHUNK_BYTES, ME, ONE, TWO, World, lie

from protocol.core import transfer
from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.core.sync import StateSync
from protocol.errors import PeerGone, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import FetchState, StateChunk
from protocol.ports import Envelope


@pytest.fixture
def world(nursery, autojump_clock, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK_BYTES)
    return World(nursery)


async def test_a_state_comes_over_in_chunks(autojump_clock, world: World) -> None:
    await world.me.joiner.fetch(world.decision())
    assert world.me.ctx.state.digest == world.one.ctx.state.digest
    assert world.me.ctx.state.step == 1
    assert world.first.asked == list(range(len(world.first.asked)))
    assert len(world.first.asked) > 3
    assert world.second.asked == []


async def test_a_donor_that_dies_is_replaced_at_the_same_chunk(
    autojump_clock, world: World
) -> None:
    def die_at_the_third() -> None:
        if len(world.first.asked) == 3:
            world.first.die()

    world.first.before_serving = die_at_the_third
    await world.me.joiner.fetch(world.decision())
    assert world.me.ctx.state.digest == world.one.ctx.state.digest
    assert world.first.asked == [0, 1, 2]
    assert world.second.asked[0] == 2


async def test_a_frozen_donor_is_replaced_after_its_deadline(autojump_clock, world: World) -> None:
    world.first.before_serving = lambda: world.first.host.freeze(1000)
    await world.me.joiner.fetch(world.decision())
    assert world.me.ctx.state.digest == world.one.ctx.state.digest
    assert trio.current_time() <= LIMITS.request_s + LIMITS.delivery_s


async def test_a_donor_of_another_state_is_passed_by(autojump_clock, world: World) -> None:
    decision = world.decision()
    world.first.train()  # it has gone on to step 2
    await world.me.joiner.fetch(decision)
    assert world.second.asked[0] == 0
    assert world.me.ctx.state.digest == decision.digests[1]


async def test_without_any_donor_the_state_is_as_it_was(autojump_clock, world: World) -> None:
    before = world.me.ctx.state.digest
    for donor in (world.one, world.two):
        donor.die()
    with pytest.raises(PeerGone, match="none of 2"):
        await world.me.joiner.fetch(world.decision())
    alone = world.decision(roster=(PEERS[:1], (ME,), PEERS[4:5]))
    with pytest.raises(PeerGone, match="no other holder"):
        await world.me.joiner.fetch(alone)
    assert world.me.ctx.state.digest == before


async def test_a_state_with_another_digest_is_refused_and_its_giver_asked_last(
    autojump_clock, world: World
) -> None:
    before = world.me.ctx.state.digest
    liar, honest = world.first, world.second
    lie(liar)
    with pytest.raises(ProtocolViolation, match="another digest"):
        await world.me.joiner.fetch(world.decision())
    assert world.me.ctx.state.digest == before
    for seed in range(transfer.MOST_TIMES):  # whatever the shuffle says
        world.me.ctx.rng.seed(seed)
        liar.asked.clear()
        await world.me.joiner.fetch(world.decision())
        assert liar.asked == []
    assert world.me.ctx.state.digest == honest.ctx.state.digest


async def test_a_donor_cannot_make_the_state_longer_on_the_way(
    autojump_clock, world: World
) -> None:
    liar = world.first
    serve = liar.donor.serve

    async def longer(message: FetchState, sender) -> None:
        if message.chunk == 0:
            return await serve(message, sender)
        reply = StateChunk(
            step=message.step, stage=1, chunk=message.chunk, num_chunks=2**20,
            digest=world.decision().digests[1],
        )  # fmt: skip
        await liar.ctx.try_send(sender, reply, (torch.zeros(20, dtype=torch.uint8),))
        return None

    liar.donor.serve = longer
    await world.me.joiner.fetch(world.decision())
    assert liar.asked == [0, 1]
    assert world.me.ctx.state.digest == world.second.ctx.state.digest


async def test_chunks_that_nobody_asked_for_are_not_kept(autojump_clock, world: World) -> None:
    joiner = world.me.joiner
    for chunk in range(100):
        message = StateChunk(step=1, stage=1, chunk=chunk, num_chunks=100, digest="0" * 64)
        joiner.deliver(Envelope(ONE, message, (torch.zeros(1000, dtype=torch.uint8),)))
    assert joiner._answer is None


async def test_who_asks_for_many_chunks_at_once_gets_one(
    nursery, autojump_clock, world: World
) -> None:
    for chunk in range(50):
        message = FetchState(step=1, stage=1, chunk=chunk)
        nursery.start_soon(world.one.donor.serve, message, ME)
    await trio.sleep(5)
    received = [e for e in world.trace.find("received") if e.details[1] == "state_chunk"]
    assert len(received) == 1


async def test_nobody_is_sent_the_state_again_and_again(autojump_clock, world: World) -> None:
    for _ in range(transfer.MOST_TIMES):
        await world.me.joiner.fetch(world.decision(roster=[[ONE], [ONE]]))
    with pytest.raises(PeerGone):
        await world.me.joiner.fetch(world.decision(roster=[[ONE], [ONE]]))
    world.one.donor.forget()  # the next step
    await world.me.joiner.fetch(world.decision(roster=[[ONE], [ONE]]))


async def test_the_state_of_another_stage_is_not_to_be_had(
    autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[StateChunk] = []

    async def note(_: object, peer: PeerId, message: StateChunk, tensors: object = ()) -> bool:
        sent.append(message)
        return True

    monkeypatch.setattr(Context, "try_send", note)
    for stage in (1, 2):
        await world.one.donor.serve(FetchState(step=1, stage=stage, chunk=0), ME)
    assert [message.digest is not None for message in sent] == [True, False]


async def test_a_donor_says_that_a_past_state_is_gone(autojump_clock, world: World) -> None:
    before = world.me.ctx.state.digest
    past = world.decision(digests=("0" * 64, before, "2" * 64)).model_copy(update={"step": 0})
    started = trio.current_time()
    with pytest.raises(PeerGone):
        await world.me.joiner.fetch(past)
    assert trio.current_time() < started + 1
    assert (world.one.asked, world.two.asked) == ([0], [0])


# --- until it is had, or out of date -------------------------------------------------------


async def test_fetching_goes_on_until_a_donor_is_back(
    nursery, autojump_clock, world: World
) -> None:
    decision, changed = world.decision(), Signal()
    sync = StateSync(world.me.joiner, world.me.observer, Random(0), changed, lambda _: True)
    world.network.partition([ME], [ONE, TWO], 20.0)
    await sync.run(decision)
    assert world.me.ctx.state.digest == decision.digests[1]
    assert trio.current_time() > 20


async def test_fetching_ends_when_the_swarm_has_moved_on(
    nursery, autojump_clock, world: World
) -> None:
    changed, is_wanted = Signal(), True
    sync = StateSync(world.me.joiner, world.me.observer, Random(0), changed, lambda _: is_wanted)
    for donor in (world.one, world.two):
        donor.die()
    nursery.start_soon(sync.run, world.decision())
    await trio.sleep(30)
    is_wanted = False
    changed.notify()
    await trio.testing.wait_all_tasks_blocked()
    failed = len(list(world.trace.find("state_transfer_failed")))
    await trio.sleep(30)
    assert len(list(world.trace.find("state_transfer_failed"))) == failed > 3
