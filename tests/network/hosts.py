"""A stock libp2p host and ours under the same roof, and a stock client to attack them with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from multiaddr import Multiaddr

from node.transport import Libp2pNetwork
from node.transport.host import PROTOCOL, HardenedHost
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.wire import Limits

LISTEN = "/ip4/127.0.0.1/tcp/0"
SWARM = "ab" * 32
QUICK = Deadlines().scaled(0.2)

Handler = Callable[["Server", Any], Awaitable[None]]
Made = tuple["Server", AbstractAsyncContextManager[None]]


class Silent:
    """An Observer that counts errors."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self.codes.append(labels.get("code", ""))

    def gauge(self, name: str, value: float, **labels: str) -> None:
        pass

    def event(self, name: str, **fields: object) -> None:
        pass


@dataclass
class Server:
    """A running host. Its streams are kept, and read from once ``reads`` is set."""

    host: BasicHost
    hardened: HardenedHost | None
    peer_id: PeerId
    address: str = ""
    streams: list[Any] = field(default_factory=list)
    reads: trio.Event = field(default_factory=trio.Event)
    died: trio.Event = field(default_factory=trio.Event)

    @property
    def network(self) -> Any:
        return self.host.get_network()

    @property
    def num_connections(self) -> int:
        return len(self.network.get_connections())

    async def connect(self, address: str) -> Any:
        """Make one further connection, the way that this kind of host does it."""
        if self.hardened is None:
            return await dial(self.host, address)
        peer = PeerId(str(info_from_p2p_addr(Multiaddr(address)).peer_id))
        muxer = await self.hardened.connect(peer, address)
        return next(c for c in self.network.get_connections() if c.muxed_conn is muxer)


async def hold(server: Server, muxed: Any) -> None:
    """Keep a stream; swallow what arrives once the test says so."""
    server.streams.append(muxed)
    await server.reads.wait()
    view = memoryview(bytearray(4096))
    while server.hardened is not None:
        await muxed.read_into(view)
    while True:
        await muxed.read(4096)


def _stock(key: NodeKey, listen: str, handler: Handler) -> Made:
    """The host that the library makes when it is asked for nothing special."""
    host = new_host(key_pair=create_new_key_pair(key.seed))
    server = Server(host, None, key.peer_id)

    async def take(stream: Any) -> None:
        await handler(server, stream)

    host.set_stream_handler(PROTOCOL, take)
    return server, host.run([Multiaddr(listen)])


def _ours(key: NodeKey, listen: str, handler: Handler) -> Made:
    """Our host with the same handler."""

    async def serve(_: PeerId, stream: Any) -> None:
        stream.conn.adopted.set()
        try:
            await handler(server, stream)
        except Exception:  # the test's handler may end as it likes
            return

    hardened = HardenedHost(key, serve, QUICK, Silent())
    server = Server(hardened._host, hardened, key.peer_id)
    return server, hardened.running([listen])


def _node(key: NodeKey, listen: str, _: Handler) -> Made:
    """Our host with the handler that a daemon has."""
    network = Libp2pNetwork(key, SWARM, limits=Limits(1), observer=Silent(), deadlines=QUICK)
    return Server(network._host._host, network._host, key.peer_id), network.running([listen])


@asynccontextmanager
async def serving(
    kind: str, number: int = 1, listen: str = LISTEN, handler: Handler = hold
) -> AsyncIterator[Server]:
    """Run a host in a task of its own; ``died`` is set if that task ends by itself.

    ``kind`` is "stock", "ours" or "node": ours with a daemon's handler.
    """
    make = {"stock": _stock, "ours": _ours, "node": _node}[kind]
    server, running = make(NodeKey(bytes([number]) * 32), listen, handler)
    ready = trio.Event()

    async def run() -> None:
        async with running:
            (listener,) = server.network.listeners.values()
            server.address = f"{listener.get_addrs()[0]}/p2p/{server.peer_id}"
            ready.set()
            try:
                await trio.sleep_forever()
            finally:
                if scope.cancel_called:
                    with trio.move_on_after(3, shield=True):
                        await server.host.close()

    async def watched() -> None:
        try:
            await run()
        except (Exception, BaseExceptionGroup):
            if not scope.cancel_called:
                server.died.set()
                return
            raise

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(watched)
            await ready.wait()
            yield server
        scope.cancel()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def client(number: int = 2, **options: Any) -> AsyncIterator[BasicHost]:
    """Run a stock host that does not dial by itself: the attacker, or an honest stranger."""
    options.setdefault("key_pair", create_new_key_pair(bytes([number]) * 32))
    options.setdefault("connection_config", ConnectionConfig(min_connections=0, low_watermark=0))
    host = new_host(**options)
    host.get_network().set_resource_manager(None)
    host.get_network().retry_config = RetryConfig(max_retries=0)
    async with host.run([]):
        yield host
        with trio.move_on_after(3, shield=True):
            await host.close()


async def dial(host: BasicHost, address: str) -> Any:
    """Make one connection to an address that ends in /p2p/ and a PeerID."""
    identity = ID.from_string(address.rpartition("/")[2])
    return await host.get_network().dial_addr(Multiaddr(address), identity)


async def open_stream(host: BasicHost, connection: Any) -> Any:
    """Open a stream of our protocol on a connection."""
    stream = await connection.new_stream()
    communicator = MultiselectCommunicator(stream)
    stream.set_protocol(await host.multiselect_client.select_one_of([PROTOCOL], communicator, 5))
    return stream


async def eventually(check: Any, limit_s: float = 5.0) -> bool:
    """Tell whether ``check`` becomes true within the limit."""
    with trio.move_on_after(limit_s):
        while not check():
            await trio.sleep(0.02)
    return bool(check())


def tcp_stream(connection: Any) -> trio.SocketStream:
    """The TCP stream below a connection of either kind."""
    packets = connection.muxed_conn.secured_conn.conn
    stream: trio.SocketStream = packets.read_writer.read_write_closer.stream.stream
    return stream


class Gate:
    """A socket that is slow to send: nothing leaves before the gate is opened."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self.entered, self.opened = trio.Event(), trio.Event()

    async def send(self, data: Any, *flags: int) -> int:
        self.entered.set()
        await self.opened.wait()
        return await self._sock.send(data, *flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)
