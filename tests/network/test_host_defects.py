"""The eleven defects of a stock py-libp2p 0.8.1 host, and their absence on ours.

Each is shown on both hosts. A stock case that starts to fail after an upgrade of the library says
that the patch for it may go.
"""

from __future__ import annotations

import gc
import logging
import struct
from collections.abc import Iterator
from typing import Any

import libp2p.network.swarm as swarm
import multiaddr
import pytest
import trio
from hosts import LISTEN, QUICK, Silent, client, dial, eventually, open_stream, serving
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA, YAMUX_HEADER_FORMAT

from node.transport import Libp2pNetwork
from protocol.errors import PeerGone
from protocol.keys import NodeKey
from protocol.messages import Assign
from protocol.wire import Limits

both = pytest.mark.parametrize("kind", ["stock", "ours"])
# Stock hosts, attackers among them, leave their sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    yield
    gc.collect()


@both
async def test_1_plaintext_lets_anybody_claim_a_peer_id(kind: str):
    """An attacker without the victim's key is taken for the victim."""
    victim = create_new_key_pair(b"\x09" * 32)
    forged = create_new_key_pair(b"\x08" * 32)

    class Forged(type(forged.private_key)):
        """A key of our own that shows the victim's public half."""

        def get_public_key(self) -> Any:
            return victim.public_key

    pair = KeyPair(Forged(forged.private_key.impl), victim.public_key)
    plaintext = {PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)}
    async with (
        serving(kind) as server,
        client(key_pair=forged, sec_opt=plaintext) as liar,
    ):
        try:
            with trio.move_on_after(3):
                await dial(liar, server)
        except swarm.SwarmException:
            pass
        await trio.sleep(0.1)
        seen = ID.from_pubkey(victim.public_key) in server.network.connections
    assert seen == (kind == "stock")


NOT_UTF8 = bytes.fromhex("05fffefdfc0a")


@both
async def test_2_and_3_a_few_bytes_that_are_not_text_kill_the_host(kind: str):
    """An error in one stream's negotiation reaches ``host.run``."""
    async with serving(kind) as server, client() as attacker:
        stream = await (await dial(attacker, server)).new_stream()
        await stream.write(NOT_UTF8)
        died = await eventually(server.died.is_set, 1.0)
        assert died == (kind == "stock")
        if kind == "ours":
            other = await dial(attacker, server)
            assert await open_stream(attacker, other)


@both
async def test_4_the_inbound_slot_of_a_closed_connection_stays_taken(kind: str):
    """250 connections in its lifetime, and a stock host takes no more."""
    async with serving(kind) as server, client() as guest:
        for _ in range(5):
            connection = await dial(guest, server)
            await connection.close()
        assert await eventually(lambda: server.num_connections == 0)
        await eventually(lambda: server.network._inbound_limiter.borrowed_tokens == 0, 1.0)
        assert server.network._inbound_limiter.borrowed_tokens == (5 if kind == "stock" else 0)


@both
async def test_5_cancelled_writes_destroy_the_connection(kind: str):
    """A cancelled write burns a nonce or cuts a frame; then nothing gets through any more."""
    async with serving("ours", 1) as server, serving(kind, 2) as sender:
        server.reads.set()
        sender_host = sender.host
        if kind == "ours":
            identity, address = ID.from_string(server.peer_id), multiaddr.Multiaddr(server.address)
            connection = await sender.network.dial_addr(address, identity)
        else:
            connection = await dial(sender_host, server)
        muxer = connection.muxed_conn
        stream = await open_stream(sender_host, connection)
        block = bytes(MEBIBYTE)
        for attempt in range(30):
            try:
                with trio.move_on_after(0.0005 * (attempt % 10)):
                    await stream.write(block)
            except IOException:
                break
            if muxer.is_closed:
                break
        alive = False
        with trio.move_on_after(3):
            try:
                alive = bool(await open_stream(sender_host, connection))
            except Exception:  # however the stock host reports it
                alive = False
        assert alive == (kind == "ours")


@both
async def test_6_a_frozen_peer_holds_a_writer_for_ever(kind: str):
    """A peer that never reads: ours loses the connection after ``write_stall_s``."""
    async with serving(kind, 1) as server, client() as frozen:
        connection = await dial(frozen, server)
        await open_stream(frozen, connection)
        assert await eventually(lambda: len(server.streams) == 1)
        connection.muxed_conn.secured_conn.read = _never
        muxed = server.streams[0]
        muxed = getattr(muxed, "muxed_stream", muxed)
        muxed.send_window = 1 << 30  # the peer's window, had it granted one
        ended = False
        with trio.move_on_after(5 * QUICK.write_stall_s):
            try:
                await muxed.write(bytes(64 * MEBIBYTE))
            except Exception:  # any end will do
                ended = True
        assert ended == (kind == "ours")


async def _never(*_: object) -> bytes:
    await trio.sleep_forever()
    return b""


@both
async def test_7_every_connect_waits_for_a_quarter_of_a_second(kind: str, monkeypatch):
    """The delay between addresses is waited for even when there is one address."""
    monkeypatch.setattr(swarm, "_HAPPY_EYEBALLS_DELAY", 0.25)
    async with serving("stock", 1) as server, serving(kind, 2) as dialler:
        before = trio.current_time()
        await dialler.host.connect(info_from_p2p_addr(multiaddr.Multiaddr(server.address)))
        took_s = trio.current_time() - before
    assert (swarm._HAPPY_EYEBALLS_DELAY > 0) == (kind == "stock")
    if kind == "stock":
        assert took_s >= 0.25


@both
async def test_8_a_mute_listener_holds_a_dial(kind: str):
    """Nobody answers the handshake: ours gives up at its deadline."""
    mute = trio.socket.socket()
    await mute.bind(("127.0.0.1", 0))
    mute.listen()
    address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}"
    peer = NodeKey(b"\x07" * 32).peer_id
    with mute, trio.move_on_after(2 * QUICK.dial_s) as scope:
        if kind == "ours":
            network = Libp2pNetwork(
                NodeKey(b"\x02" * 32),
                "ab" * 32,
                limits=Limits(1),
                observer=Silent(),
                deadlines=QUICK,
            )
            async with network.running([LISTEN]):
                network.introduce(peer, [address])
                with pytest.raises(PeerGone):
                    await network.send(peer, Assign(step=0, stage=1))
        else:
            async with client() as dialler:
                await dialler.connect(
                    info_from_p2p_addr(multiaddr.Multiaddr(f"{address}/p2p/{peer}"))
                )
    assert scope.cancelled_caught == (kind == "stock")


@both
async def test_9_the_host_dials_whomever_it_has_heard_of(kind: str):
    """The auto-connector runs through the peerstore without being asked."""
    async with serving("stock", 1) as server, serving(kind, 2) as dialler:
        info = info_from_p2p_addr(multiaddr.Multiaddr(server.address))
        dialler.host.get_peerstore().add_addrs(info.peer_id, info.addrs, 3600)
        await dialler.network.auto_connector.maybe_connect()
        dialled = await eventually(lambda: dialler.num_connections > 0, 1.0)
    assert dialled == (kind == "stock")


@both
async def test_10_refused_connections_leave_their_scopes_behind(kind: str):
    """Past the limit per peer (8) each refused connection keeps a place for ever."""
    async with serving(kind) as server, client() as guest:
        connections = []
        for _ in range(12):
            try:
                with trio.fail_after(2):
                    connections.append(await dial(guest, server))
            except (swarm.SwarmException, trio.TooSlowError):
                pass
        for connection in connections:
            await connection.close()
        assert await eventually(lambda: server.num_connections == 0)
        manager = server.network._resource_manager
        held = manager._current_connections if manager is not None else 0
    assert (held > 0) == (kind == "stock")


@both
async def test_11_a_sender_that_ignores_the_window_fills_the_memory(kind: str):
    """40 MiB into a stream that nobody reads: ours cuts the sender off at its window."""
    async with serving(kind) as server, client() as attacker:
        connection = await dial(attacker, server)
        stream = await open_stream(attacker, connection)
        assert await eventually(lambda: len(server.streams) == 1)
        muxer = server.network.get_connections()[0].muxed_conn
        stream_id = stream.muxed_stream.stream_id
        block = bytes(32 * 1024)
        header = struct.pack(YAMUX_HEADER_FORMAT, 0, TYPE_DATA, 0, stream_id, len(block))
        most = 0
        with trio.move_on_after(10):
            try:
                for _ in range(40 * 32):
                    await connection.muxed_conn.secured_conn.write(header + block)
                    held = sum(len(b) for b in muxer.stream_buffers.values())
                    most = max(most, held)
            except Exception:  # cut off
                pass
        await eventually(lambda: muxer.is_closed, 1.0)
        assert muxer.is_closed == (kind == "ours")
    assert (most > 16 * MEBIBYTE) == (kind == "stock")
