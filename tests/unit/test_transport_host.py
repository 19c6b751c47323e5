"""Strangers at the door: what they send is counted under a code of the tree and goes no further."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trio
from libp2p.network.stream.net_stream import NetStream
from test_transport_network import LISTEN, QUICK, Recorder, key

from node.transport.addresses import endpoint
from node.transport.host import HardenedHost
from node.transport.muxer import Muxer
from node.transport.stream import MuxedStream
from protocol.errors import ProtocolViolation, ResourceError
from protocol.keys import PeerId

NOT_TEXT = bytes.fromhex("05fffefdfc0a")
NO_KEY = bytes(32)


@asynccontextmanager
async def hosting(number: int) -> AsyncIterator[tuple[HardenedHost, Recorder]]:
    """Run a host that keeps each connection and does nothing with it."""

    async def keep(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.adopted.set()
        await stream.conn.event_closed.wait()

    observer = Recorder()
    host = HardenedHost(key(number), keep, QUICK, observer)
    async with host.running(LISTEN):
        yield host, observer


async def knock(host: HardenedHost) -> trio.SocketStream:
    """Connect without a handshake."""
    ip, port = endpoint(host.addresses[0].partition("/p2p/")[0])
    return await trio.open_tcp_stream(ip, port)


async def receive(stream: trio.SocketStream, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await stream.receive_some(num_bytes - len(data))
        assert part, "the host closed the connection"
        data += part
    return data


def line(text: str) -> bytes:
    return bytes([len(text) + 1]) + text.encode() + b"\n"


def packet(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


async def choose_noise(stream: trio.SocketStream) -> None:
    lines = [line("/multistream/1.0.0"), line("/noise")]
    await stream.send_all(b"".join(lines))
    await receive(stream, sum(map(len, lines)))


async def begin_noise(stream: trio.SocketStream) -> None:
    await choose_noise(stream)
    await stream.send_all(packet(os.urandom(32)))
    await receive(stream, int.from_bytes(await receive(stream, 2), "big"))


async def nothing(_: trio.SocketStream) -> None:
    pass


Prelude = Callable[[trio.SocketStream], Awaitable[None]]
HANDSHAKES: dict[str, tuple[Prelude, bytes]] = {
    "garbage": (nothing, b"\xff" * 200),
    "no text": (nothing, NOT_TEXT),
    "a claim of 2^63 bytes": (nothing, b"\xff" * 8 + b"\x7f"),
    "a claim of 2^40 bytes and some of them": (
        nothing,
        b"\x80\x80\x80\x80\x80\x20" + bytes(1 << 20),
    ),
    "silence": (nothing, b""),
    "a Noise key that is none": (choose_noise, packet(NO_KEY)),
    "half a Noise key": (choose_noise, packet(b"x" * 10)),
    "an empty Noise message": (choose_noise, packet(b"")),
    "a Noise message that is not authentic": (begin_noise, packet(b"x" * 200)),
    "a Noise message without a tag": (begin_noise, packet(b"x")),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_a_failed_handshake_is_counted_and_closed(name: str):
    prelude, data = HANDSHAKES[name]
    async with hosting(1) as (host, observer), hosting(2) as (guest, _):
        async with await knock(host) as stream:
            await prelude(stream)
            with suppress(trio.BrokenResourceError):  # cut off before it has said all
                await stream.send_all(data)
            with trio.fail_after(3 * QUICK.negotiate_s):
                await _closed(stream)
                while not observer.counts:
                    await trio.sleep(0.01)
        assert observer.counts == {("errors", ProtocolViolation.code): 1}
        assert await guest.open_stream(await guest.connect(host.peer_id, host.addresses[0]))


async def _closed(stream: trio.SocketStream) -> None:
    """Read to the end of the connection, which may come as a reset."""
    with suppress(trio.BrokenResourceError):
        while await stream.receive_some():
            pass


async def test_a_failed_negotiation_is_counted_and_ends_its_stream_only():
    async with hosting(1) as (host, observer), hosting(2) as (guest, _):
        muxer = await guest.connect(host.peer_id, host.addresses[0])
        kept = await guest.open_stream(muxer)
        bad = await muxer.open_stream()
        await NetStream(bad, None, None).write(NOT_TEXT)
        with trio.fail_after(QUICK.negotiate_s):
            while not bad.reset_received:
                await trio.sleep(0.01)
        assert observer.counts == {("errors", ProtocolViolation.code): 1}
        assert not kept.closed
        assert not muxer.event_closed.is_set()


async def test_beyond_the_limit_of_handshakes_the_oldest_gives_way(
    monkeypatch: pytest.MonkeyPatch,
):
    """Whoever lets its handshake hang makes room for a stranger who does not."""
    monkeypatch.setattr("node.transport.host.MAX_HANDSHAKES", 2)
    async with (
        hosting(1) as (host, observer),
        hosting(2) as (guest, _),
        await knock(host) as first,
        await knock(host) as other,
    ):
        for stream in (first, other):
            await receive(stream, 1)  # it waits for the rest of their handshakes
        with trio.fail_after(QUICK.negotiate_s):
            assert await guest.connect(host.peer_id, host.addresses[0])
            await _closed(first)
        assert observer.counts == {("errors", ProtocolViolation.code): 1}


async def test_a_handshake_byte_by_byte_ends_at_its_deadline():
    async with hosting(1) as (host, observer), await knock(host) as stream:
        with trio.fail_after(3 * QUICK.negotiate_s), suppress(trio.BrokenResourceError):
            for byte in b"\x13/multistream/1.0.0\n" * 100:
                await stream.send_all(bytes([byte]))
                await trio.sleep(QUICK.negotiate_s / 20)
        assert observer.counts == {("errors", ProtocolViolation.code): 1}


async def test_an_address_that_connects_on_and_on_is_turned_away_unheard(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("node.transport.allowance.CONNECTION_BURST", 3.0)
    monkeypatch.setattr("node.transport.allowance.CONNECTION_RATE", 0.001)
    async with hosting(1) as (host, observer):
        for number in range(6):
            async with await knock(host) as stream:
                if number < 3:
                    await receive(stream, 1)
                    continue
                with trio.fail_after(QUICK.negotiate_s):
                    await _closed(stream)
        assert observer.counts["errors", ResourceError.code] == 3


async def test_a_connection_beyond_the_limit_of_its_peer_is_refused():
    async with hosting(1) as (host, observer), hosting(2) as (guest, _):
        muxers: list[Muxer] = []
        for _ in range(7):
            muxers.append(await guest.connect(host.peer_id, host.addresses[0]))
        with trio.fail_after(QUICK.negotiate_s):
            await muxers[-1].event_closed.wait()
        assert observer.counts == {("errors", ResourceError.code): 1}
        assert not muxers[0].event_closed.is_set()
