"""Two and more real nodes in one process, over loopback."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import torch
import trio
import trio.testing

from node.transport import Heartbeat, Libp2pNetwork
from protocol.deadlines import Deadlines
from protocol.errors import PeerGone, PeerTimeout, ResourceError
from protocol.keys import NodeKey, PeerId
from protocol.messages import Assign, Forward, Message
from protocol.ports import Envelope, PeerChange
from protocol.wire import Limits

SWARM = "ab" * 32
LISTEN = ["/ip4/127.0.0.1/tcp/0"]
QUICK = Deadlines().scaled(0.25)
LIMITS = Limits(max_tensor_bytes=1 << 20)


class Recorder:
    """An Observer that remembers."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, ...], float] = {}
        self.events: list[tuple[str, dict[str, object]]] = []

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        key = (name, *labels.values())
        self.counts[key] = self.counts.get(key, 0) + amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        pass

    def event(self, name: str, **fields: object) -> None:
        self.events.append((name, fields))


def key(number: int) -> NodeKey:
    return NodeKey(bytes([number]) * 32)


def network(
    number: int, swarm: str = SWARM, deadlines: Deadlines = QUICK, **options
) -> Libp2pNetwork:
    options.setdefault("observer", Recorder())
    options.setdefault("limits", LIMITS)
    return Libp2pNetwork(key(number), swarm, deadlines=deadlines, rng=random.Random(1), **options)


@asynccontextmanager
async def running(*networks: Libp2pNetwork) -> AsyncIterator[None]:
    """Run networks that know each other."""
    async with AsyncExitStack() as stack:
        for node in networks:
            await stack.enter_async_context(node.running(LISTEN))
        for node in networks:
            for other in networks:
                node.introduce(other.peer_id, other.addresses)
        yield


async def next_message(node: Libp2pNetwork) -> Envelope:
    while True:
        event = await node.events.receive()
        if isinstance(event, Envelope):
            return event


async def next_change(node: Libp2pNetwork) -> PeerChange:
    while True:
        event = await node.events.receive()
        if isinstance(event, PeerChange):
            return event


async def post(node: Libp2pNetwork, peer: PeerId, message: Message, tensors=()) -> None:
    """Send what may still be under way when the test ends."""
    with suppress(PeerGone):
        await node.send(peer, message, tensors)


async def drain(node: Libp2pNetwork, into: list) -> None:
    async for event in node.events:
        into.append(event)


def forward(slot: int = 0) -> Forward:
    return Forward(step=1, data_node=key(1).peer_id, slot=slot, attempt=0, stage=1, path=())


async def test_messages_and_tensors_arrive_with_the_proven_sender():
    a, b = network(1), network(2)
    tensor = torch.randn(3, 70, 500)
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, forward(), [tensor])
        assert await b.events.receive() == PeerChange(a.peer_id, True)
        envelope = await next_message(b)
        assert (envelope.sender, envelope.message) == (a.peer_id, forward())
        assert torch.equal(envelope.tensors[0], tensor)
        nursery.start_soon(post, b, a.peer_id, Assign(step=1, stage=2))
        assert (await next_message(a)).message == Assign(step=1, stage=2)
        assert list(a.connected()) == [b.peer_id]


async def test_send_returns_only_when_the_core_took_the_message():
    a, b = network(1), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        sent = trio.Event()

        async def send() -> None:
            await a.send(b.peer_id, Assign(step=1, stage=1))
            sent.set()

        nursery.start_soon(send)
        assert isinstance(await b.events.receive(), PeerChange)
        with trio.move_on_after(0.1):
            await sent.wait()
        assert not sent.is_set()
        await next_message(b)
        await sent.wait()


async def test_order_is_kept_on_each_lane():
    a, b = network(1), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        tensor = torch.zeros(1 << 16)
        for slot in range(20):
            nursery.start_soon(post, a, b.peer_id, forward(slot), [tensor])
            await trio.testing.wait_all_tasks_blocked()
        slots = [(await next_message(b)).message.slot for _ in range(20)]
    assert slots == list(range(20))


@pytest.mark.parametrize("seed", range(10))
async def test_simultaneous_dials_make_one_session(seed: int):
    a, b = network(1), network(2)
    rng = random.Random(seed)
    heard_a: list = []
    heard_b: list = []
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(drain, a, heard_a)
        nursery.start_soon(drain, b, heard_b)
        pause_a, pause_b = rng.choice([(0, 0), (0, 0.003), (0.003, 0), (0.006, 0), (0, 0.009)])

        async def send(node: Libp2pNetwork, peer: PeerId, pause_s: float) -> None:
            await trio.sleep(pause_s)
            await node.send(peer, Assign(step=1, stage=1))

        async with trio.open_nursery() as senders:
            senders.start_soon(send, a, b.peer_id, pause_a)
            senders.start_soon(send, b, a.peer_id, pause_b)
        nursery.cancel_scope.cancel()
    for heard, peer in ((heard_a, b.peer_id), (heard_b, a.peer_id)):
        assert heard[0] == PeerChange(peer, True)
        assert [type(event) for event in heard] == [PeerChange, Envelope]


async def test_a_restarted_peer_replaces_its_session():
    a, b = network(1), network(2)
    async with running(a), trio.open_nursery() as nursery, running(b):
        a.introduce(b.peer_id, b.addresses)
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        await next_message(b)
        again = network(2)
        async with again.running(LISTEN):
            again.introduce(a.peer_id, a.addresses)
            nursery.start_soon(post, again, a.peer_id, Assign(step=2, stage=1))
            events = [await a.events.receive() for _ in range(4)]
    assert [e.is_up if isinstance(e, PeerChange) else e.message.step for e in events] == [
        True, False, True, 2,
    ]  # fmt: skip
    assert events[1].reason == "replaced by a newer session"


async def test_the_end_of_a_peer_is_seen_and_its_senders_are_told():
    a, b = network(1), network(2)
    outcome: list[Exception] = []

    async def send() -> None:
        try:
            await a.send(b.peer_id, forward(), [torch.zeros(1000)])
        except PeerGone as error:
            outcome.append(error)

    async with running(a), trio.open_nursery() as nursery:
        async with running(b):
            a.introduce(b.peer_id, b.addresses)
            nursery.start_soon(send)
            assert (await next_change(b)).is_up  # b's core never takes the message
            assert await next_change(a) == PeerChange(b.peer_id, True)
        assert not (await next_change(a)).is_up
    assert len(outcome) == 1


async def test_a_peer_without_address_or_listener_is_gone():
    a, b = network(1), network(2)
    async with running(a):
        with pytest.raises(PeerGone, match="no address"):
            await a.send(b.peer_id, Assign(step=1, stage=1))
        a.introduce(b.peer_id, ["/ip4/127.0.0.1/tcp/1"])
        with pytest.raises(PeerGone, match="cannot be reached"):
            await a.send(b.peer_id, Assign(step=1, stage=1))
        with pytest.raises(PeerGone, match="a moment ago"):
            await a.send(b.peer_id, Assign(step=1, stage=1))


async def test_a_dead_address_before_a_good_one_does_not_matter():
    a, b = network(1), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        a.introduce(b.peer_id, ["/ip4/127.0.0.1/tcp/1", *b.addresses])
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        assert (await next_message(b)).sender == a.peer_id


async def test_an_impostor_at_the_address_is_refused():
    a, b, c = network(1), network(2), network(3)
    async with running(a, c):
        a.introduce(b.peer_id, [c.addresses[0].replace(c.peer_id, b.peer_id)])
        with pytest.raises(PeerGone):
            await a.send(b.peer_id, Assign(step=1, stage=1))
        assert not c.connected()


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"swarm": "cd" * 32}, "another swarm"), ({"wall_clock": lambda: 0.0}, "clocks")],
)
async def test_a_node_that_cannot_be_in_this_swarm_is_refused(options: dict, reason: str):
    a, b = network(1), network(2, **options)
    async with running(a, b):
        with pytest.raises(PeerGone, match=reason):
            await a.send(b.peer_id, Assign(step=1, stage=1))
        assert not b.connected()


async def test_a_node_does_not_send_to_itself():
    a = network(1)
    async with running(a):
        with pytest.raises(ValueError):
            await a.send(a.peer_id, Assign(step=1, stage=1))


async def test_a_core_that_does_not_listen_holds_back_its_peers():
    """With 2 MiB of credit, frames beyond it are not even written."""
    credit = 2 << 20
    a = network(1, bulk_credit_bytes=credit)
    b = network(2, bulk_credit_bytes=credit)
    tensor = torch.zeros(1 << 17)  # 512 KiB
    async with running(a, b), trio.open_nursery() as nursery:
        for slot in range(12):
            nursery.start_soon(post, a, b.peer_id, forward(slot), [tensor])
        assert (await next_change(b)).is_up
        await trio.sleep(0.3)
        (status,) = a.peers()
        assert 2 * tensor.nbytes < status.bytes_out < credit + 4096
        slots = sorted([(await next_message(b)).message.slot for _ in range(12)])
        assert slots == list(range(12))


async def test_delivery_that_takes_too_long_is_a_timeout_and_keeps_the_session():
    quick = QUICK.model_copy(update={"delivery_s": 0.3})
    a, b = network(1, deadlines=quick), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, Assign(step=0, stage=1))
        await next_message(b)
        with pytest.raises(PeerTimeout):
            await a.send(b.peer_id, Assign(step=1, stage=1))
        nursery.start_soon(post, a, b.peer_id, Assign(step=2, stage=1))
        assert [(await next_message(b)).message.step for _ in range(2)] == [1, 2]


async def test_many_cancelled_sends_harm_nobody():
    a, b = network(1), network(2)
    tensor = torch.arange(1 << 18, dtype=torch.int32).view(torch.float32)  # 1 MiB
    heard: list = []
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(drain, b, heard)
        for slot in range(60):
            with trio.move_on_after(0.0002 * (slot % 20)):
                await a.send(b.peer_id, forward(slot), [tensor])
        await a.send(b.peer_id, forward(1000), [tensor])
        nursery.cancel_scope.cancel()
    assert sum(isinstance(event, PeerChange) for event in heard) == 1
    assert heard[-1].message.slot == 1000
    assert all(
        torch.equal(e.tensors[0].view(torch.int32), tensor.view(torch.int32)) for e in heard[1:]
    )


async def test_heartbeats_carry_what_the_callback_says_and_measure_the_round_trip():
    heard: list[tuple[PeerId, Heartbeat]] = []
    a = network(1, heartbeat=lambda peer: Heartbeat(7, 0.5, 3 if peer == key(2).peer_id else 0))
    b = network(2, on_heartbeat=lambda peer, beat: heard.append((peer, beat)))
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        await next_message(b)
        while b.rtt_s(a.peer_id) is None or a.rtt_s(b.peer_id) is None:
            await trio.sleep(0.05)
        assert heard[0] == (a.peer_id, Heartbeat(7, 0.5, 3))
        assert 0 <= b.rtt_s(a.peer_id) < 0.2
        (status,) = b.peers()
        assert status.heartbeat == Heartbeat(7, 0.5, 3)
        assert not status.is_dialler
        assert status.address.startswith("/ip4/127.0.0.1/tcp/")


async def test_drop_ends_the_session_for_both():
    a, b = network(1), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        await next_message(b)
        assert (await next_change(a)).is_up
        a.drop(b.peer_id, "sent nonsense")
        assert await next_change(a) == PeerChange(b.peer_id, False, "sent nonsense")
        assert not (await next_change(b)).is_up
        assert not a.connected()
        assert not b.connected()


async def test_a_taken_port_is_a_resource_error():
    a, b = network(1), network(2)
    async with a.running(LISTEN):
        port = a.addresses[0].split("/")[4]
        with pytest.raises(ResourceError, match="in use"):
            async with b.running([f"/ip4/127.0.0.1/tcp/{port}"]):
                pass


async def test_an_address_that_is_not_here_is_a_resource_error():
    with pytest.raises(ResourceError):
        async with network(1).running(["/ip4/192.0.2.1/tcp/0"]):
            pass


async def test_wildcards_are_published_as_real_addresses():
    a = network(1)
    async with a.running(["/ip4/0.0.0.0/tcp/0"]):
        assert a.addresses
        assert all("0.0.0.0" not in address for address in a.addresses)
        assert all(address.endswith(f"/p2p/{a.peer_id}") for address in a.addresses)


async def test_bytes_and_frames_are_counted_by_kind_and_direction():
    observers = Recorder(), Recorder()
    a, b = network(1, observer=observers[0]), network(2, observer=observers[1])
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, forward(), [torch.zeros(1000)])
        await next_message(b)
    assert observers[0].counts["frames", "forward", "out"] == 1
    assert observers[1].counts["frames", "forward", "in"] == 1
    sent = observers[0].counts["bytes", "forward", "out"]
    assert sent == observers[1].counts["bytes", "forward", "in"] > 4000


async def test_clock_offsets_are_reported():
    observer = Recorder()
    a, b = (
        network(1, observer=observer, wall_clock=lambda: 1000.0),
        network(2, wall_clock=lambda: 1005.0),
    )
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        await next_message(b)
    assert ("clock_offset_seen", {"peer": b.peer_id, "offset_s": 5.0}) in observer.events


async def test_both_directions_at_once_do_not_wait_for_each_other():
    a, b = network(1), network(2)
    tensor = torch.zeros(1 << 18)  # 1 MiB
    heard: dict[PeerId, list] = {a.peer_id: [], b.peer_id: []}
    async with running(a, b), trio.open_nursery() as nursery:
        for node in (a, b):
            nursery.start_soon(drain, node, heard[node.peer_id])
        async with trio.open_nursery() as senders:
            for slot in range(30):
                senders.start_soon(a.send, b.peer_id, forward(slot), [tensor])
                senders.start_soon(b.send, a.peer_id, forward(slot), [tensor])
        nursery.cancel_scope.cancel()
    assert [len(events) for events in heard.values()] == [31, 31]


async def test_a_large_tensor_does_not_hold_up_small_messages():
    limits = Limits(max_tensor_bytes=64 << 20)
    a, b = network(1, limits=limits), network(2, limits=limits)
    order: list[str] = []
    async with running(a, b), trio.open_nursery() as nursery:
        nursery.start_soon(post, a, b.peer_id, forward(), [torch.zeros(16 << 20)])
        await next_change(b)
        nursery.start_soon(post, a, b.peer_id, Assign(step=1, stage=1))
        for _ in range(2):
            order.append((await next_message(b)).message.kind)
    assert order == ["assign", "forward"]
