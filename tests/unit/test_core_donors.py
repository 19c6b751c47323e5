"""Donors of a state: few guests at a time, in order, at their owner's rate; liars are found out."""

from __future__ import annotations

from random import Random

import pytest
import torch
import trio
from core_kit import LIMITS
from transfer_kit import CHUNK_BYTES, ME, ONE, TWO, Computer, World, lie

from protocol.core import transfer
from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.core.sync import StateSync
from protocol.core.transfer import Donor
from protocol.core.turns import Turns
from protocol.errors import PeerGone, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import FetchState, StateChunk
from protocol.simulation.adapter import address_of


@pytest.fixture
def world(nursery, autojump_clock, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK_BYTES)
    return World(nursery)


@pytest.fixture
def slow_sending(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PeerId, StateChunk]]:
    """Each chunk takes a second; what was sent is noted."""
    sent: list[tuple[PeerId, StateChunk]] = []

    async def slow(_: object, peer: PeerId, message: StateChunk, tensors: object = ()) -> bool:
        await trio.sleep(1 if tensors else 0)
        sent.append((peer, message))
        return True

    monkeypatch.setattr(Context, "try_send", slow)
    return sent


async def test_few_are_served_at_the_same_time_and_the_others_in_the_order_of_their_coming(
    nursery, autojump_clock, world: World, slow_sending
) -> None:
    """Each chunk under way holds memory of the node, and a state that comes late is of no use."""
    donor, peers = world.one.donor, [PeerId(f"p{number:02}") for number in range(40)]
    whole: list[PeerId] = []

    async def fetch(peer: PeerId) -> None:
        chunk = 0
        while True:
            await donor.serve(FetchState(step=1, stage=1, chunk=chunk), peer)
            _, answer = next(item for item in reversed(slow_sending) if item[0] == peer)
            if answer.is_busy:
                await trio.sleep(0.5)
                continue
            chunk += 1
            if chunk == answer.num_chunks:
                whole.append(peer)
                return

    for peer in peers:
        nursery.start_soon(fetch, peer)
        await trio.sleep(0.001)
    started = trio.current_time()
    while len(whole) < len(peers):
        await trio.sleep(0.5)
        assert len(donor._served) <= transfer.MOST_AT_ONCE
    num_chunks = slow_sending[-1][1].num_chunks
    assert set(whole[:4]) == set(peers[:4])  # these have it before anybody else has begun
    assert sorted(whole) == peers
    waves = [set(whole[n : n + 4]) for n in range(0, 40, 4)]
    assert waves == [set(peers[n : n + 4]) for n in range(0, 40, 4)]
    assert trio.current_time() - started < 10 * num_chunks * 1.5


async def test_who_falls_silent_loses_its_turn(autojump_clock, world: World, slow_sending) -> None:
    for number in range(transfer.MOST_AT_ONCE + 1):
        await world.one.donor.serve(FetchState(step=1, stage=1, chunk=0), PeerId(f"p{number}"))
    assert [answer.is_busy for _, answer in slow_sending] == [False] * 4 + [True]
    await trio.sleep(LIMITS.session_silence_s)
    await world.one.donor.serve(FetchState(step=1, stage=1, chunk=0), PeerId("late"))
    assert not slow_sending[-1][1].is_busy


async def test_a_busy_donor_is_passed_by_at_the_same_chunk(autojump_clock, world: World) -> None:
    """Two joiners, two donors of one guest each: neither waits for the other."""
    for number in range(transfer.MOST_AT_ONCE):
        world.first.donor._turns.admits(PeerId(f"p{number}"), trio.current_time())
    await world.me.joiner.fetch(world.decision())
    assert world.first.asked == [0]
    assert world.second.asked[0] == 0
    assert world.me.ctx.state.digest == world.one.ctx.state.digest


async def test_when_all_are_busy_the_joiner_asks_again_without_a_failure(
    autojump_clock, world: World
) -> None:
    for donor in (world.one.donor, world.two.donor):
        for number in range(transfer.MOST_AT_ONCE):
            donor._turns.admits(PeerId(f"p{number}"), trio.current_time())
    await world.me.joiner.fetch(world.decision())  # the guests fell silent
    assert trio.current_time() > LIMITS.session_silence_s
    asked = len(world.one.asked) + len(world.two.asked)
    assert asked < 60
    assert world.me.ctx.state.digest == world.one.ctx.state.digest


async def test_a_donor_keeps_to_its_owners_rate(autojump_clock, world: World) -> None:
    world.one.donor = Donor(world.one.ctx, bytes_per_s=CHUNK_BYTES / 2)
    started = trio.current_time()
    await world.me.joiner.fetch(world.decision(roster=[[ONE], [ONE]]))
    num_chunks = len(world.one.asked)
    assert trio.current_time() - started >= 2 * (num_chunks - 1)
    slow = Donor(world.one.ctx, bytes_per_s=CHUNK_BYTES / (LIMITS.request_s / 4))
    assert slow._turns._num_at_once == 2  # or a chunk would come too late for its request


async def test_what_came_is_not_fetched_again_after_all_donors_were_lost(
    autojump_clock, world: World
) -> None:
    def part_us() -> None:
        if len(world.first.asked) == 3:
            world.network.partition([ME], [ONE, TWO], 50.0)

    world.first.before_serving = part_us
    decision = world.decision()
    with pytest.raises(PeerGone):
        await world.me.joiner.fetch(decision)
    for asked in (world.first.asked, world.second.asked):
        asked.clear()
    sync = StateSync(world.me.joiner, world.me.observer, Random(0), Signal(), lambda _: True)
    await sync.run(decision)
    assert world.me.ctx.state.digest == decision.digests[1]
    assert min([*world.first.asked, *world.second.asked]) == 2


async def test_of_several_givers_the_liar_is_found_out(autojump_clock, world: World) -> None:
    """The honest one had a part in the wrong state, too, and must not be blamed for good."""
    liar, honest = world.first, world.second
    lie(liar, chunk=0)

    def silence() -> None:
        if len(liar.asked) == 2:
            liar.donor._turns = Turns(0, 1.0)  # busy for ever, after one chunk

    liar.before_serving = silence
    with pytest.raises(ProtocolViolation):
        await world.me.joiner.fetch(world.decision())
    assert honest.asked[0] == 1
    liar.donor._turns = Turns(4, 1.0)
    liar.before_serving = lambda: None
    results = []
    for seed in range(4):
        world.me.ctx.rng.seed(seed)
        liar.asked.clear()
        try:
            await world.me.joiner.fetch(world.decision())
        except ProtocolViolation:
            results.append("refused")
        else:
            results.append("asked" if liar.asked else "whole")
    assert results in (
        ["refused", "whole", "whole", "whole"],
        ["whole", "refused", "whole", "whole"],
    )


async def test_a_chunk_under_way_does_not_change_with_the_buffers(
    autojump_clock, world: World
) -> None:
    state, donor = world.one.ctx.state, world.one.donor
    await donor.serve(FetchState(step=1, stage=1, chunk=0), ME)
    chunk = donor._chunk(1)
    before = chunk.clone()
    for piece in state.view_state()[2]:
        piece.zero_()
    assert torch.equal(chunk, before)


async def test_the_pieces_of_a_state_make_its_bytes_whatever_their_lengths(
    autojump_clock, world: World
) -> None:
    donor = world.one.donor
    data = torch.arange(103, dtype=torch.uint8)
    for ends in ((103,), (7, 96), (20, 83), (45, 1, 57)):
        donor._view = 1, "0" * 64, torch.split(data, list(ends))
        num_chunks = donor._num_chunks(FetchState(step=1, stage=1, chunk=0))
        assert torch.equal(torch.cat([donor._chunk(n) for n in range(num_chunks)]), data)
        assert num_chunks == 6


@pytest.mark.parametrize("num_newcomers", [20])
async def test_many_newcomers_over_few_donors(
    nursery, autojump_clock, world: World, num_newcomers: int
) -> None:
    """All have the state soon, and each donor gave about half of it."""
    newcomers = [Computer(world, 10 + number) for number in range(num_newcomers)]
    times: list[float] = []
    decision = world.decision()

    async def join(newcomer: Computer) -> None:
        await newcomer.joiner.fetch(decision)
        assert newcomer.ctx.state.digest == decision.digests[1]
        times.append(trio.current_time())

    for newcomer in newcomers:
        for peer in (ONE, TWO):
            newcomer.network.introduce(peer, [address_of(peer)])
        nursery.start_soon(newcomer.live)
    async with trio.open_nursery() as joining:
        for newcomer in newcomers:
            joining.start_soon(join, newcomer)
    assert len(times) == num_newcomers
    assert times[0] < times[-1] / 2  # the first have it long before the last
    gave = [world.one.donor._given.total(), world.two.donor._given.total()]
    assert min(gave) > 0.25 * sum(gave)
    codes = [e.details for e in world.trace.find("counted") if e.details[0] == "errors"]
    assert codes == []
