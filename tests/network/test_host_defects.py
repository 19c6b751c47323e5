"""The eleven defects of a stock py-libp2p 0.8.1 host, and their absence on ours.

Each is shown on both hosts. A stock case that starts to fail after an upgrade of the library says
that the patch for it may go.
"""

from __future__ import annotations

import gc
import logging
import select
import struct
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import libp2p.network.swarm as swarm
import pytest
import trio
import trio.testing
from hosts import (
    LISTEN,
    QUICK,
    SWARM,
    Gate,
    Server,
    Silent,
    client,
    dial,
    eventually,
    open_stream,
    serving,
    tcp_stream,
)
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA, YAMUX_HEADER_FORMAT
from multiaddr import Multiaddr

from node.transport import Libp2pNetwork
from protocol.errors import PeerGone
from protocol.keys import NodeKey, PeerId
from protocol.messages import Assign
from protocol.wire import MEBIBYTE, PREFIX_BYTES, Codec, Limits

both = pytest.mark.parametrize("kind", ["stock", "ours"])
# Stock hosts, attackers among them, leave their sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


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
                await dial(liar, server.address)
        except swarm.SwarmException:
            pass
        await trio.sleep(0.1)
        seen = ID.from_pubkey(victim.public_key) in server.network.connections
    assert seen == (kind == "stock")


async def _dies(server: Server, attack: Callable[[BasicHost, Any], Awaitable[None]]) -> bool:
    """Attack a host through a connection; a survivor must still talk to somebody else."""
    async with client(2) as attacker, client(3) as guest:
        await attack(attacker, await dial(attacker, server.address))
        if await eventually(server.died.is_set, 1.0):
            return True
        assert await open_stream(guest, await dial(guest, server.address))
        return False


@both
async def test_2_what_a_stream_handler_raises_ends_the_host(kind: str):
    """Both handlers open a frame that is none; ours is the one that a daemon has."""

    async def open_frame(_: Server, stream: Any) -> None:
        Codec(Limits(1)).open_prefix(await stream.read(PREFIX_BYTES))

    async def send_garbage(attacker: BasicHost, connection: Any) -> None:
        stream = await open_stream(attacker, connection)
        await stream.write(b"\xff" * PREFIX_BYTES)

    async with serving("node" if kind == "ours" else kind, handler=open_frame) as server:
        assert await _dies(server, send_garbage) == (kind == "stock")


@both
async def test_3_a_few_bytes_that_are_not_text_end_the_host(kind: str):
    """The negotiation of a stream's protocol takes them for UTF-8."""

    async def speak_badly(_: BasicHost, connection: Any) -> None:
        stream = await connection.new_stream()
        await stream.write(bytes.fromhex("05fffefdfc0a"))

    async with serving(kind) as server:
        assert await _dies(server, speak_badly) == (kind == "stock")


@both
async def test_4_the_inbound_slot_of_a_closed_connection_stays_taken(kind: str):
    """A stock host takes 250 connections in its lifetime and then no more; here 3."""
    num_taken = 0
    async with serving(kind) as server, client() as guest:
        server.network._inbound_limiter.total_tokens = 3
        for _ in range(6):
            try:
                with trio.fail_after(3):
                    connection = await dial(guest, server.address)
            except (swarm.SwarmException, trio.TooSlowError):
                continue
            num_taken += 1
            await connection.close()
            assert await eventually(lambda: server.num_connections == 0)
    assert num_taken == (3 if kind == "stock" else 6)


@both
@pytest.mark.parametrize("what", ["write", "read", "new_stream"])
async def test_5_a_cancelled_call_destroys_the_connection(kind: str, what: str):
    """Cancelled between encrypting and sending it burns a nonce; then nothing gets through."""
    async with serving("ours", 1) as peer, serving(kind, 2) as host, trio.open_nursery() as tasks:
        connection = await host.connect(peer.address)
        stream = await open_stream(host.host, connection)
        assert await eventually(lambda: len(peer.streams) == 1)
        calls = {
            "write": lambda: stream.write(bytes(1000)),
            "read": lambda: _read_all(stream),
            "new_stream": lambda: open_stream(host.host, connection),
        }
        await trio.testing.wait_all_tasks_blocked(0.3)  # the stock host identifies itself
        tcp = tcp_stream(connection)
        gate = tcp.socket = Gate(tcp.socket)
        scope = trio.CancelScope()
        tasks.start_soon(_within, scope, calls[what])
        if what == "read":
            tasks.start_soon(_push, peer.streams[0])
        with trio.fail_after(5):
            await gate.entered.wait()
        scope.cancel()
        gate.opened.set()
        assert await _is_alive(host, connection) == (kind == "ours")
        tasks.cancel_scope.cancel()


async def _within(scope: trio.CancelScope, call: Callable[[], Awaitable[Any]]) -> None:
    with scope:
        await call()


async def _read_all(stream: Any) -> None:
    """Read on and on: a read writes where it gives the window back."""
    while True:
        await stream.read(64 * 1024)


async def _push(muxed: Any) -> None:
    """Send more than the window that a stream starts with."""
    try:
        await muxed.write_buffers([bytes(MEBIBYTE)])
    except Exception:  # the connection breaks under it
        return


async def _is_alive(host: Server, connection: Any) -> bool:
    with trio.move_on_after(3):
        try:
            return bool(await open_stream(host.host, connection))
        except Exception:  # however the stock host reports it
            return False
    return False


@both
@pytest.mark.parametrize("what", ["write", "disconnect"])
async def test_6_a_frozen_peer_with_a_full_socket_holds_everybody(kind: str, what: str):
    """Ours gives the connection up after ``write_stall_s``; stock keeps it as if it were good."""
    written = trio.Event()
    async with serving(kind, 1) as host, client(2) as frozen, trio.open_nursery() as tasks:
        connection = await dial(frozen, host.address)
        await open_stream(frozen, connection)
        assert await eventually(lambda: len(host.streams) == 1)
        connection.muxed_conn.secured_conn.read = _never
        tasks.start_soon(_fill, host.streams[0], written)
        await _stays_full(host.network.get_connections()[0])
        calls = {
            "write": written.wait,
            "disconnect": partial(host.host.disconnect, frozen.get_id()),
        }
        with trio.move_on_after(4 * QUICK.write_stall_s) as scope:
            await calls[what]()
        assert scope.cancelled_caught == (kind == "stock")
        is_gone = await eventually(lambda: host.num_connections == 0, 1.0)
        assert is_gone == (kind == "ours")
        tasks.cancel_scope.cancel()


async def _fill(stream: Any, written: trio.Event) -> None:
    """Write more than a socket holds, as if the peer had granted a window for it."""
    muxed = getattr(stream, "muxed_stream", stream)
    muxed.send_window = 1 << 30
    try:
        await muxed.write(bytes(64 * MEBIBYTE))
    except Exception:  # any end will do
        written.set()


async def _stays_full(connection: Any) -> None:
    """Wait until nothing could be written for half a second, or the connection ended."""
    sock, num_looks = tcp_stream(connection).socket, 0
    while num_looks < 10 and not connection.muxed_conn.is_closed:
        num_looks = 0 if select.select([], [sock], [], 0)[1] else num_looks + 1
        await trio.sleep(0.05)


async def _never(*_: object) -> bytes:
    await trio.sleep_forever()
    return b""


@both
async def test_7_every_connect_waits_for_a_fixed_time(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The pause between a peer's addresses is made even if there is one; here it is ten times
    the library's quarter of a second, so that no slow machine is taken for it.
    """
    pause_s = 10 * swarm._HAPPY_EYEBALLS_DELAY
    assert pause_s > 1.0
    monkeypatch.setattr(swarm, "_HAPPY_EYEBALLS_DELAY", pause_s)
    async with serving("stock", 1) as server, serving(kind, 2) as dialler:
        before = trio.current_time()
        if kind == "stock":
            await dialler.host.connect(info_from_p2p_addr(Multiaddr(server.address)))
        else:
            await dialler.connect(server.address)
        took_s = trio.current_time() - before
        assert dialler.num_connections == 1
    assert (took_s >= pause_s) == (kind == "stock")


@both
async def test_8_a_mute_listener_holds_a_dial(kind: str):
    """Nobody answers the handshake: ours gives up at its deadline."""
    mute = trio.socket.socket()
    await mute.bind(("127.0.0.1", 0))
    mute.listen()
    peer = NodeKey(b"\x07" * 32).peer_id
    address = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}/p2p/{peer}"
    with mute, trio.move_on_after(3 * QUICK.dial_s) as scope:
        if kind == "ours":
            await _send_in_vain(peer, address)
        else:
            async with serving("stock") as dialler:
                await dialler.host.connect(info_from_p2p_addr(Multiaddr(address)))
    assert scope.cancelled_caught == (kind == "stock")


async def _send_in_vain(peer: PeerId, address: str) -> None:
    key = NodeKey(b"\x02" * 32)
    network = Libp2pNetwork(key, SWARM, limits=Limits(1), observer=Silent(), deadlines=QUICK)
    async with network.running([LISTEN]):
        network.introduce(peer, [address])
        with pytest.raises(PeerGone):
            await network.send(peer, Assign(step=0, stage=1))


@both
async def test_9_the_host_dials_whomever_it_has_heard_of(kind: str):
    """The auto-connector runs through the peerstore without being asked."""
    async with serving("stock", 1) as server, serving(kind, 2) as dialler:
        info = info_from_p2p_addr(Multiaddr(server.address))
        dialler.host.get_peerstore().add_addrs(info.peer_id, info.addrs, 3600)
        await dialler.network.auto_connector.maybe_connect()
        dialled = await eventually(lambda: dialler.num_connections > 0, 1.0)
    assert dialled == (kind == "stock")


@both
async def test_10_refused_connections_leave_their_scopes_behind(kind: str):
    """Past the limit per peer each refused connection keeps a place for ever."""
    async with serving(kind) as server, client() as guest:
        connections = []
        for _ in range(12):
            try:
                with trio.fail_after(2):
                    connections.append(await dial(guest, server.address))
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
        connection = await dial(attacker, server.address)
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
