"""A stock libp2p host and ours under the same roof, and a stock client to attack them with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import multiaddr
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from node.transport.host import PROTOCOL, HardenedHost
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId

LISTEN = "/ip4/127.0.0.1/tcp/0"
QUICK = Deadlines().scaled(0.2)


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
    """A host under attack: stock or ours, with one protocol that swallows what it gets or not."""

    host: BasicHost
    peer_id: PeerId
    address: str
    streams: list[Any]
    reads: trio.Event
    died: trio.Event

    @property
    def network(self) -> Any:
        return self.host.get_network()

    @property
    def port(self) -> int:
        return int(self.address.split("/")[4])

    @property
    def num_connections(self) -> int:
        return len(self.network.get_connections())


@asynccontextmanager
async def serving(kind: str, number: int = 1) -> AsyncIterator[Server]:
    """Run a host in a task of its own; ``died`` is set if that task ends by itself."""
    key = NodeKey(bytes([number]) * 32)
    ready: trio.Event = trio.Event()
    server: list[Server] = []

    async def take(muxed: Any) -> None:
        server[0].streams.append(muxed)
        await server[0].reads.wait()
        view = memoryview(bytearray(4096))
        while kind == "ours":
            await muxed.read_into(view)
        while True:
            await muxed.read(4096)

    async def run() -> None:
        if kind == "ours":

            async def serve(_: PeerId, stream: Any) -> None:
                stream.conn.adopted.set()
                try:
                    await take(stream)
                except Exception:  # the test's handler may end as it likes
                    return

            ours = HardenedHost(key, serve, QUICK, Silent())
            host, running = ours._host, ours.running([LISTEN])
        else:
            host = new_host(key_pair=create_new_key_pair(key.seed))
            host.set_stream_handler(PROTOCOL, take)
            running = host.run([multiaddr.Multiaddr(LISTEN)])
        async with running:
            (listener,) = host.get_network().listeners.values()
            address = f"{listener.get_addrs()[0]}/p2p/{key.peer_id}"
            server.append(Server(host, key.peer_id, address, [], trio.Event(), trio.Event()))
            ready.set()
            try:
                await trio.sleep_forever()
            finally:
                if scope.cancel_called:
                    with trio.move_on_after(3, shield=True):
                        await host.close()

    async def watched() -> None:
        try:
            await run()
        except (Exception, BaseExceptionGroup):
            if not scope.cancel_called:
                server[0].died.set()
                return
            raise

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(watched)
            await ready.wait()
            yield server[0]
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


async def dial(host: BasicHost, server: Server) -> Any:
    """Make one connection to the server."""
    identity = ID.from_string(server.peer_id)
    return await host.get_network().dial_addr(multiaddr.Multiaddr(server.address), identity)


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
