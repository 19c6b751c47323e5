"""A peer that breaks the protocol loses its session; the node and its other peers do not notice."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import trio
from test_transport_network import (
    LIMITS,
    LISTEN,
    QUICK,
    SWARM,
    Recorder,
    drain,
    forward,
    key,
    network,
    next_change,
    next_message,
    post,
    running,
)

from node.transport import Libp2pNetwork
from node.transport.allowance import STRANGER_RATE
from node.transport.control import CONTROL_CODES, Ack
from node.transport.dialling import AddressBook, Dial, Dialler
from node.transport.greeting import Greeter
from node.transport.host import HardenedHost
from node.transport.stream import MuxedStream
from protocol.errors import PeerGone
from protocol.keys import PeerId
from protocol.messages import Assign
from protocol.ports import Envelope, PeerChange
from protocol.wire import MAGIC, Codec, Limits

CODEC = Codec(Limits(max_tensor_bytes=1 << 30), CONTROL_CODES)


@asynccontextmanager
async def attacker(victim: Libp2pNetwork) -> AsyncIterator[dict[str, MuxedStream]]:
    """Open a proper session with the victim by hand; yield its two streams."""

    async def refuse(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.abort()

    host = HardenedHost(key(9), refuse, QUICK, Recorder())
    greeter = Greeter(SWARM, CODEC, time.time)
    book = AddressBook(1.0, None)  # type: ignore[arg-type]
    book.learn(victim.peer_id, victim.addresses)
    async with host.running(LISTEN):
        meeting = await Dialler(host, greeter, book, QUICK).dial(Dial(victim.peer_id))
        assert meeting is not None
        for stream in meeting.streams.values():
            stream.conn.adopted.set()
        yield meeting.streams


def raw(*, code: int = 2, header: int = 0, payload: int = 0, sequence: int = 1, ack: int = 0):
    return struct.pack("!4sBBIQIQQ", MAGIC, 1, code, header, payload, 0, sequence, ack)


def frame(message, *tensors: torch.Tensor, sequence: int = 1, ack: int = 0) -> bytes:
    return b"".join(CODEC.encode(message, tensors).buffers(sequence, ack))


ATTACKS = {
    "garbage": ("control", b"\xff" * 200),
    "a claim of 2^63 bytes": ("bulk", raw(code=11, payload=2**63)),
    "a tensor beyond the limit": ("bulk", raw(code=11, payload=LIMITS.max_tensor_bytes + 1)),
    "a header beyond the limit": ("control", raw(header=2**32 - 1)),
    "an unknown type": ("control", raw(code=99)),
    "a wrong checksum": ("control", frame(Assign(step=1, stage=1))[:-1] + b"\xff"),
    "a skipped sequence number": ("control", frame(Assign(step=1, stage=1), sequence=2)),
    "an acknowledgement of nothing": ("control", frame(Ack(), sequence=0, ack=5)),
    "a bulk message on the control lane": ("control", frame(forward(), torch.zeros(3))),
    "a numbered control frame": ("control", frame(Ack(), sequence=1)),
}


@pytest.mark.parametrize("name", ATTACKS)
async def test_a_violation_ends_the_session_and_is_counted(name: str):
    observer = Recorder()
    a, b = network(1, observer=observer), network(2)
    lane, data = ATTACKS[name]
    async with running(a, b), attacker(a) as streams, trio.open_nursery() as nursery:
        assert (await next_change(a)).peer == key(9).peer_id
        await streams[lane].write_buffers([data])
        change = await next_change(a)
        assert (change.peer, change.is_up) == (key(9).peer_id, False)
        assert observer.counts["errors", "protocol_violation"] == 1
        nursery.start_soon(post, b, a.peer_id, Assign(step=1, stage=1))
        assert (await next_message(a)).sender == b.peer_id


async def test_half_a_frame_and_then_the_end_delivers_nothing():
    a = network(1)
    async with running(a):
        async with attacker(a) as streams:
            await next_change(a)
            await streams["bulk"].write_buffers([frame(forward(), torch.zeros(1000))[:-5]])
            await trio.sleep(0.05)
        event = await a.events.receive()
        assert isinstance(event, PeerChange)
        assert not event.is_up


async def test_a_flood_beyond_the_credit_is_cut_off():
    """The core does not listen; the attacker does not wait for acknowledgements."""
    observer = Recorder()
    credit = 2 << 20
    a = network(1, observer=observer, bulk_credit_bytes=credit)
    tensor = torch.zeros(1 << 17)
    async with running(a), attacker(a) as streams:
        assert (await next_change(a)).is_up
        sent = 0
        with suppress(Exception):  # whatever the muxer says when it is cut off
            for sequence in range(1, 200):
                await streams["bulk"].write_buffers([frame(forward(), tensor, sequence=sequence)])
                sent += tensor.nbytes
        assert observer.counts["errors", "protocol_violation"] == 1
        assert sent < 40 << 20
        received = observer.counts["bytes", "forward", "in"]
        assert received <= credit


async def test_a_flood_of_small_frames_costs_a_stranger_its_session(
    monkeypatch: pytest.MonkeyPatch,
):
    """The core takes everything, so no credit bounds it; what is read in all does."""
    monkeypatch.setattr("node.transport.allowance.STRANGER_BURST", 500.0)
    observer, peer = Recorder(), key(9).peer_id
    a, b = network(1, observer=observer), network(2)
    async with running(a, b), attacker(a) as streams, trio.open_nursery() as nursery:
        a.expect([b.peer_id])
        assert (await next_change(a)).is_up
        nursery.start_soon(flood, streams["control"])
        heard: list[Envelope | PeerChange] = []
        began = trio.current_time()
        nursery.start_soon(drain, a, heard)
        with trio.fail_after(20):
            while peer in a.connected():
                await trio.sleep(0.02)
        assert observer.counts["errors", "protocol_violation"] == 1
        assert len(heard) <= 500 + STRANGER_RATE * (trio.current_time() - began)
        await b.send(a.peer_id, Assign(step=1, stage=1))  # and nobody else notices
        nursery.cancel_scope.cancel()


async def flood(stream: MuxedStream) -> None:
    with suppress(Exception):  # whatever the muxer says when it is cut off
        for sequence in range(1, 100_000):
            await stream.write_buffers([frame(Assign(step=1, stage=1), sequence=sequence)])


async def test_who_spent_what_it_may_gets_no_new_session():
    a, flooder = network(1), network(2)
    async with running(a, flooder):
        a.expect([])
        while a._allowances.of(flooder.peer_id).begin_session():
            pass
        with pytest.raises(PeerGone, match="takes no more sessions"):
            await flooder.send(a.peer_id, Assign(step=1, stage=1))


async def test_strangers_leave_room_for_whom_the_swarm_counts_on(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("node.transport.network.MAX_SESSIONS", 1)
    a, member, stranger = network(1), network(2), network(3)
    async with running(a, member, stranger), attacker(a):
        a.expect([member.peer_id])
        assert (await next_change(a)).is_up
        with pytest.raises(PeerGone, match="takes no more sessions"):
            await stranger.send(a.peer_id, Assign(step=1, stage=1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(post, member, a.peer_id, Assign(step=1, stage=1))
            assert (await next_message(a)).sender == member.peer_id


async def test_sessions_in_the_making_count_too(monkeypatch: pytest.MonkeyPatch):
    """Otherwise a thousand strangers greet first and then all come in at once."""
    monkeypatch.setattr("node.transport.network.MAX_SESSIONS", 2)
    a = network(1)
    async with running(a):
        a.expect([])
        a._reception._halves |= {key(n).peer_id: None for n in (7, 8)}  # type: ignore[misc]
        assert a._judge(key(9).peer_id) == "full"
        assert a._judge(key(8).peer_id) is None


async def test_a_claim_takes_no_memory_before_its_bytes_are_there():
    """Within the limit of its type, and then nothing comes: many strangers could do that."""
    size = 256 << 20
    a = network(1, limits=Limits(max_tensor_bytes=size))
    header = CODEC.encode(forward(), [torch.empty(size, dtype=torch.uint8)]).header
    claim = raw(code=11, header=len(header), payload=size) + header + bytes(1000)
    async with running(a), attacker(a) as streams:
        assert (await next_change(a)).is_up
        before = psutil.Process().memory_info().rss
        await streams["bulk"].write_buffers([claim])
        await trio.sleep(0.3)
        assert a.connected()
        assert psutil.Process().memory_info().rss - before < size // 4


SLOW = {
    "a prefix": ("control", frame(Assign(step=1, stage=1))[:-1], 1),
    "a header": ("control", raw(header=60_000) + bytes(59_000), 1),
    "a payload": ("bulk", frame(forward(), torch.zeros(1 << 16)), 16),
}


@pytest.mark.parametrize("name", SLOW)
async def test_a_frame_byte_by_byte_holds_nothing_else_up(name: str):
    """It keeps a session and the memory of one frame, and no more, for as long as it likes."""
    a, b = network(1), network(2)
    lane, data, size = SLOW[name]
    async with running(a, b), attacker(a) as streams, trio.open_nursery() as nursery:
        assert (await next_change(a)).is_up
        nursery.start_soon(drip, streams[lane], data, size)
        await trio.sleep(0.3)
        nursery.start_soon(post, b, a.peer_id, Assign(step=1, stage=1))
        assert (await next_message(a)).sender == b.peer_id
        nursery.cancel_scope.cancel()


async def drip(stream: MuxedStream, data: bytes, size: int) -> None:
    with suppress(Exception):
        for at in range(0, len(data), size):
            await stream.write_buffers([data[at : at + size]])
            await trio.sleep(0.005)


async def test_a_peer_that_only_greets_is_dropped_for_its_silence():
    a = network(1)
    async with running(a), attacker(a):
        assert (await next_change(a)).is_up
        with trio.fail_after(3 * QUICK.session_silence_s):
            change = await next_change(a)
        assert "silent" in change.reason


async def test_a_connection_that_never_greets_is_closed():
    a = network(1)

    async def refuse(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.abort()

    host = HardenedHost(key(9), refuse, QUICK, Recorder())
    async with running(a), host.running(LISTEN):
        muxer = await host.connect(a.peer_id, a.addresses[0])
        with trio.fail_after(3 * QUICK.dial_s):
            await muxer.event_closed.wait()


async def test_connections_beyond_the_limit_of_a_peer_are_closed():
    a = network(1)

    async def refuse(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.abort()

    host = HardenedHost(key(9), refuse, QUICK, Recorder())
    async with running(a), host.running(LISTEN):
        muxers = [await host.connect(a.peer_id, a.addresses[0]) for _ in range(8)]
        with trio.fail_after(QUICK.negotiate_s):
            await muxers[-1].event_closed.wait()
        assert not muxers[0].event_closed.is_set()


PEER = """
import sys, trio, torch
sys.path[:0] = [{tests!r}]
from test_transport_network import *

async def main():
    b = network(2)
    async with b.running(LISTEN):
        print(b.addresses[0], flush=True)
        async for event in b.events:
            if isinstance(event, Envelope):
                print(event.message.slot, flush=True)
                await trio.sleep_forever()  # its core takes one message and no more

trio.run(main)
"""


@asynccontextmanager
async def process() -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """Run node 2 in a process of its own; yield it and its address."""
    code = PEER.format(tests=str(Path(__file__).parent))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        line = await trio.to_thread.run_sync(child.stdout.readline)
        yield child, line.decode().strip()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_killed_or_frozen_process_is_noticed(fault: signal.Signals):
    a = network(1)
    peer = key(2).peer_id
    heard: list[Envelope | PeerChange] = []
    async with running(a), process() as (child, address), trio.open_nursery() as nursery:
        a.introduce(peer, [address])
        nursery.start_soon(drain, a, heard)
        await a.send(peer, forward(0), [torch.zeros(10)])
        for slot in range(1, 4):
            nursery.start_soon(post, a, peer, forward(slot), [torch.zeros(1 << 17)])
        await trio.sleep(0.05)
        os.kill(child.pid, fault)
        with trio.fail_after(3 * QUICK.session_silence_s):
            while a.connected() or len(heard) < 2:
                await trio.sleep(0.02)
        assert [event.is_up for event in heard] == [True, False]
        os.kill(child.pid, signal.SIGCONT)
        nursery.cancel_scope.cancel()
