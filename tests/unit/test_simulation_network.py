"""The virtual network keeps the port's contract, and its times are those of the links."""

from __future__ import annotations

from random import Random

import pytest
import torch
import trio

from protocol.deadlines import Deadlines
from protocol.errors import PeerGone, PeerTimeout
from protocol.keys import PeerId
from protocol.messages import Backward, Message, Prepare, Release
from protocol.ports import Envelope, PeerChange
from protocol.simulation.adapter import SimulatedNetwork, address_of
from protocol.simulation.host import VirtualHost, simulation_key
from protocol.simulation.network import VirtualNetwork
from protocol.simulation.places import WORLD, Link, Place, over_the_world, uniform
from protocol.simulation.timeline import Timeline
from protocol.simulation.trace import Trace

LATENCY_S = 0.1
RTT_S = 2 * LATENCY_S
DIAL_S = 3 * RTT_S
STEADY = Link(LATENCY_S)
FAST = Place("fast", 0, 0, 1e12, 1e12)
NAMES = [simulation_key(i).peer_id for i in range(3)]
PING = Prepare(step=1, ballot=1)


class World:
    """Three nodes that know each other; received items are listed with their times."""

    def __init__(
        self, link: Link = STEADY, place: Place = FAST, deadlines: Deadlines | None = None
    ) -> None:
        self.timeline, self.trace = Timeline(), Trace()
        self.deadlines = deadlines or Deadlines()
        self.network = VirtualNetwork(
            self.timeline,
            self.trace,
            rng=Random(0),
            profile=uniform(link),
            deadlines=self.deadlines,
        )
        self.place = place
        self.hosts: list[VirtualHost] = []
        self.nodes: list[SimulatedNetwork] = []
        self.seen: list[list[tuple[float, Envelope | PeerChange]]] = [[], [], []]

    async def start(self, nursery: trio.Nursery, *, listen: bool = True) -> None:
        nursery.start_soon(self.timeline.run)
        for index, peer in enumerate(NAMES):
            host = VirtualHost(f"n{index}", peer, self.timeline, self.place)
            node = self.network.attach(host)
            for other in NAMES:
                node.introduce(other, [address_of(other)])
            self.hosts.append(host)
            self.nodes.append(node)
            nursery.start_soon(node.run)
            if listen:
                nursery.start_soon(self.listen, index)
        await trio.testing.wait_all_tasks_blocked()

    async def listen(self, index: int) -> None:
        async for item in self.nodes[index].events:
            self.seen[index].append((trio.current_time(), item))

    def envelopes(self, index: int) -> list[Message]:
        return [item.message for _, item in self.seen[index] if isinstance(item, Envelope)]

    def changes(self, index: int) -> list[tuple[float, PeerId, bool]]:
        return [
            (round(at, 6), item.peer, item.is_up)
            for at, item in self.seen[index]
            if isinstance(item, PeerChange)
        ]

    async def connect(self, a: int = 0, b: int = 1) -> None:
        await self.nodes[a].send(NAMES[b], PING)


def bulk(slot: int) -> Backward:
    return Backward(step=1, data_node=NAMES[0], slot=slot, attempt=0, stage=1, path=())


async def timed(call) -> float:
    start = trio.current_time()
    await call
    return trio.current_time() - start


async def test_send_takes_a_round_trip_and_the_first_one_a_dial(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    assert await timed(world.connect()) == pytest.approx(DIAL_S + RTT_S)
    assert await timed(world.connect()) == pytest.approx(RTT_S)
    assert world.changes(0) == [(0.6, NAMES[1], True)]
    assert world.changes(1) == [(0.6, NAMES[0], True)]
    assert [m.kind for m in world.envelopes(1)] == ["prepare", "prepare"]
    assert list(world.nodes[0].connected()) == [NAMES[1]]
    assert world.nodes[1].rtt_s(NAMES[0]) == pytest.approx(RTT_S)
    assert world.nodes[1].rtt_s(NAMES[2]) is None


async def test_two_that_dial_each_other_share_one_session(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    async with trio.open_nursery() as both:
        both.start_soon(world.connect, 0, 1)
        both.start_soon(world.connect, 1, 0)
    assert [len(world.changes(i)) for i in (0, 1)] == [1, 1]


async def test_bytes_take_time_and_share_the_uplink_in_order(nursery, autojump_clock) -> None:
    world = World(place=Place("slow", 0, 0, 1e6, 1e9))
    await world.start(nursery)
    await world.connect(0, 1)
    await world.connect(0, 2)
    start = trio.current_time()
    megabyte = torch.zeros(250_000)
    async with trio.open_nursery() as both:
        both.start_soon(world.nodes[0].send, NAMES[1], bulk(1), [megabyte])
        both.start_soon(world.nodes[0].send, NAMES[2], bulk(2), [megabyte])
    assert trio.current_time() - start == pytest.approx(2.0 + RTT_S, abs=0.01)
    arrivals = sorted(world.seen[i][-1][0] - start for i in (1, 2))
    assert arrivals == pytest.approx([1.0 + LATENCY_S, 2.0 + LATENCY_S], abs=0.01)


async def test_control_does_not_wait_behind_bulk(nursery, autojump_clock) -> None:
    world = World(place=Place("slow", 0, 0, 1e6, 1e9))
    await world.start(nursery)
    await world.connect()
    nursery.start_soon(world.nodes[0].send, NAMES[1], bulk(1), [torch.zeros(1_000_000)])
    await trio.testing.wait_all_tasks_blocked()
    assert await timed(world.connect()) == pytest.approx(RTT_S, abs=0.01)


async def test_meta_tensors_weigh_what_they_would(nursery, autojump_clock) -> None:
    world = World(link=Link(LATENCY_S, bandwidth_bytes_s=1e6))
    await world.start(nursery)
    await world.connect()
    activation = torch.empty(500_000, device="meta")
    took = await timed(world.nodes[0].send(NAMES[1], bulk(1), [activation]))
    assert took == pytest.approx(2.0 + RTT_S, abs=0.01)


async def test_lanes_stay_in_order_under_jitter_and_loss(nursery, autojump_clock) -> None:
    world = World(link=Link(LATENCY_S, jitter_s=1.0, loss=0.3))
    await world.start(nursery)
    await world.connect()
    async with trio.open_nursery() as many:
        for slot in range(30):
            many.start_soon(world.nodes[0].send, NAMES[1], bulk(slot))
            await trio.testing.wait_all_tasks_blocked()
    assert [m.slot for m in world.envelopes(1)[1:]] == list(range(30))


async def test_a_loss_costs_a_retransmission(nursery, autojump_clock) -> None:
    world = World(link=Link(LATENCY_S, loss=0.5))
    await world.start(nursery)
    await world.connect()
    times = [await timed(world.connect()) for _ in range(20)]
    late = [t for t in times if t > RTT_S + 0.01]
    assert 0 < len(late) < 20
    assert min(late) == pytest.approx(RTT_S + 2 * RTT_S)


async def test_messages_pass_their_wire_form_and_tensors_are_copied(
    nursery, autojump_clock
) -> None:
    world = World()
    await world.start(nursery)
    tensor = torch.ones(3)
    message = bulk(7)
    await world.nodes[0].send(NAMES[1], message, [tensor])
    tensor.zero_()
    envelope = world.seen[1][-1][1]
    assert envelope.message == message
    assert envelope.message is not message
    assert envelope.sender == NAMES[0]
    assert envelope.tensors[0].tolist() == [1, 1, 1]
    with pytest.raises(ValueError):
        await world.nodes[0].send(NAMES[1], PING, [tensor])


async def test_unknown_and_dead_peers_are_gone(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    stranger = simulation_key(99).peer_id
    with pytest.raises(PeerGone):
        await world.nodes[0].send(stranger, PING)
    world.hosts[1].die()
    with pytest.raises(PeerGone):
        await world.connect()


async def test_a_killed_peer_breaks_its_sessions_after_a_latency(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    start = trio.current_time()
    world.timeline.after(0.05, world.hosts[1].die)
    with pytest.raises(PeerGone):
        await world.connect()
    assert trio.current_time() - start == pytest.approx(0.05 + LATENCY_S)
    await trio.sleep(0.01)
    assert world.changes(0)[-1][2] is False
    assert list(world.nodes[0].connected()) == []


async def test_a_frozen_peer_falls_silent_and_hears_of_it_after_its_thaw(
    nursery, autojump_clock
) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    start = trio.current_time()
    world.hosts[1].freeze(10.0)
    with pytest.raises(PeerTimeout):
        await world.connect()
    assert trio.current_time() - start == pytest.approx(world.deadlines.session_silence_s)
    assert len(world.envelopes(1)) == 1
    with pytest.raises(PeerGone):  # nobody shakes hands
        await world.connect()
    await trio.sleep_until(start + 20)
    assert world.changes(1)[-1] == (round(start + 10, 6), NAMES[0], False)
    # What its kernel had taken in is seen at the thaw, although the sender gave up on it.
    assert len(world.envelopes(1)) == 2
    await world.connect()


async def test_a_short_freeze_is_only_a_delay(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    world.hosts[1].freeze(3.0)
    assert await timed(world.connect()) == pytest.approx(3.0 + LATENCY_S)
    assert len(world.changes(0)) == 1


async def test_a_frozen_node_sends_nothing(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    start = trio.current_time()
    world.hosts[0].freeze(3.0)
    await world.connect()
    assert world.seen[1][-1][0] - start == pytest.approx(3.0 + LATENCY_S)


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
async def test_a_cut_that_lasts_ends_the_session_on_both_sides(
    nursery, autojump_clock, direction
) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    a, b = direction
    start = trio.current_time()
    world.network.cut(NAMES[a], NAMES[b])
    with pytest.raises(PeerTimeout):
        await world.connect()
    assert trio.current_time() - start == pytest.approx(world.deadlines.session_silence_s)
    await trio.sleep(0.01)
    assert [world.changes(i)[-1][2] for i in (0, 1)] == [False, False]
    with pytest.raises(PeerGone):
        await world.connect()
    world.network.mend(NAMES[a], NAMES[b])
    await world.connect()
    # With only the way back cut, the message arrived: a timeout never means "not received".
    assert len(world.envelopes(1)) == (2 if a == 0 else 3)


async def test_a_short_cut_delays_and_loses_nothing(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    world.network.partition([NAMES[0]], [NAMES[1], NAMES[2]], 2.0)
    took = await timed(world.connect())
    assert 2.0 < took < 3.5
    assert len(world.envelopes(1)) == 2


async def test_a_slow_acknowledgement_is_a_timeout_and_keeps_the_session(
    nursery, autojump_clock
) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    world.hosts[0].delay(30.0, 5.0)
    assert await timed(expect_timeout(world)) == pytest.approx(world.deadlines.delivery_s)
    assert list(world.nodes[0].connected()) == [NAMES[1]]


async def expect_timeout(world: World) -> None:
    with pytest.raises(PeerTimeout):
        await world.connect()


async def test_a_duplicating_node_delivers_twice(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    world.hosts[0].duplicate(1.0)
    await world.nodes[0].send(NAMES[1], Release(step=1, data_node=NAMES[0], slot=3, attempt=0))
    await trio.sleep(2)
    assert [m.kind for m in world.envelopes(1)].count("release") == 2
    await world.connect()
    await trio.sleep(2)
    assert [m.kind for m in world.envelopes(1)].count("prepare") == 2


async def test_a_full_inbox_holds_back_the_acknowledgement(nursery, autojump_clock) -> None:
    world = World()
    await world.start(nursery, listen=False)
    acknowledged: list[int] = []

    async def send(slot: int) -> None:
        await world.nodes[0].send(NAMES[1], bulk(slot))
        acknowledged.append(slot)

    for slot in range(200):
        nursery.start_soon(send, slot)
    await trio.sleep(5)
    assert 0 < len(acknowledged) < 200
    nursery.start_soon(world.listen, 1)
    await trio.sleep(5)
    assert len(acknowledged) == len(world.envelopes(1)) == 200


async def test_drop_ends_both_sides_and_a_restart_replaces_the_session(
    nursery, autojump_clock
) -> None:
    world = World()
    await world.start(nursery)
    await world.connect()
    world.nodes[0].drop(NAMES[1], "it misbehaved")
    await trio.sleep(1)
    assert [world.changes(i)[-1][2] for i in (0, 1)] == [False, False]
    await world.connect()
    assert [world.changes(i)[-1][2] for i in (0, 1)] == [True, True]


def test_places_are_as_far_apart_as_the_world_is() -> None:
    by_name = {place.name: place for place in WORLD}
    atlantic = over_the_world(by_name["london"], by_name["virginia"])
    half_way_round = over_the_world(by_name["london"], by_name["sydney"])
    assert 0.030 < atlantic.latency_s < 0.055
    assert 0.110 < half_way_round.latency_s < 0.160
    assert len(WORLD) == 10
