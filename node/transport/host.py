"""A libp2p host that can be shown to strangers.

A stock py-libp2p 0.8.1 host can be killed by any peer with a few bytes, believes invented
identities, stops accepting after 250 connections and dials by itself. What is replaced here and
in ``noise`` and ``muxer`` mends that; tests/network/test_host_defects.py shows each defect on the
stock host and its absence on ours, so that an upgrade of the library tells what may go.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from math import ceil
from typing import Any, cast

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import StreamHandlerFn, TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from multiaddr import Multiaddr

from node.transport.addresses import dialable, ports_held
from node.transport.allowance import Door
from node.transport.muxer import Muxer, MuxerSelector
from node.transport.shield import shielded
from node.transport.stream import MuxedStream
from protocol.deadlines import Deadlines
from protocol.errors import ProtocolViolation, ResourceError
from protocol.keys import NodeKey, PeerId
from protocol.ports import Observer

PROTOCOL = TProtocol("/shoal/1")
MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_PER_PEER = 6
MAX_HANDSHAKES = 64
# A message of a negotiation is read in at most a hundred pieces of this size.
_MAX_PIECE_BYTES = 4096
# What a stranger's bytes can make the library raise while protocols are negotiated.
STRANGER_FAULTS = (
    BaseLibp2pError, OSError, EOFError, ValueError, trio.BrokenResourceError,
    trio.ClosedResourceError, trio.TooSlowError,
)  # fmt: skip

Serve = Callable[[PeerId, MuxedStream], Awaitable[None]]


class HardenedHost:
    """Listens, dials and hands every negotiated inbound stream to ``serve``.

    ``serve`` runs for as long as its stream is of use; what it raises is its own fault.
    """

    def __init__(
        self,
        key: NodeKey,
        serve: Serve,
        deadlines: Deadlines,
        observer: Observer,
        announce_host: str | None = None,
    ) -> None:
        self.peer_id = key.peer_id
        self.addresses: tuple[str, ...] = ()
        self._serve, self._deadlines, self._observer = serve, deadlines, observer
        self._announce_host = announce_host
        self._host = _make_host(key, deadlines)
        self.network = cast(Swarm, self._host.get_network())
        self.network.set_stream_handler(cast(StreamHandlerFn, self._take_stream))
        vars(self.network)["_do_handle_inbound_connection"] = self._take_connection
        # oldest first: an honest handshake takes a moment
        self._handshakes: dict[int, trio.CancelScope] = {}
        self._door = Door()

    @asynccontextmanager
    async def running(self, listen: Sequence[str]) -> AsyncIterator[None]:
        """Listen until left; ResourceError if an address cannot be had."""
        with ports_held(listen):
            async with self._host.run(listen_addrs=[Multiaddr(address) for address in listen]):
                try:
                    self.addresses = self._published(listen)
                    yield
                finally:
                    await self._close()

    def _published(self, listen: Sequence[str]) -> tuple[str, ...]:
        listening = [
            a for listener in self.network.listeners.values() for a in listener.get_addrs()
        ]
        if len(listening) < len(listen):
            raise ResourceError(f"cannot listen on all of {', '.join(listen)}")
        return dialable(listening, self.peer_id, self._announce_host)

    async def _close(self) -> None:
        """Cut every connection, then let the library tidy up; it waits 0.2 s for each in turn."""
        muxers = [cast(Muxer, c.muxed_conn) for c in self.network.get_connections()]
        for muxer in muxers:
            muxer.abort()
        with shielded(self._deadlines.negotiate_s):
            for muxer in muxers:
                await muxer.event_closed.wait()
            await self._host.close()

    # --- inbound ---------------------------------------------------------------------------

    async def _take_connection(
        self, stream: ReadWriteCloser, address: Multiaddr, _event: object
    ) -> None:
        """Hold the inbound slot for as long as the connection lives, and no longer."""
        remote = stream.get_remote_address()
        if remote is None or not self._door.lets_in(remote[0]):
            self._observer.count("errors", code=ResourceError.code)
            with trio.move_on_after(self._deadlines.negotiate_s):
                await stream.close()
            return
        muxer = await self._upgrade(_BoundedConnection(stream, False), address)
        if muxer is not None:
            await self._keep(muxer)

    async def _upgrade(self, raw: RawConnection, address: Multiaddr) -> Muxer | None:
        muxer = None
        with suppress(*STRANGER_FAULTS), self._handshake():
            muxer = cast(Muxer, await self.network.upgrade_inbound_raw_conn(raw, address))
        if muxer is None:
            self._observer.count("errors", code=ProtocolViolation.code)
            with shielded(self._deadlines.negotiate_s):
                await raw.close()
            return None
        tune(muxer, self._deadlines)
        return muxer

    @contextmanager
    def _handshake(self) -> Iterator[None]:
        """Limit a handshake's time; when there are too many at once, the oldest one ends."""
        if len(self._handshakes) >= MAX_HANDSHAKES:
            self._handshakes.pop(next(iter(self._handshakes))).cancel()
        with trio.move_on_after(self._deadlines.negotiate_s) as scope:
            self._handshakes[id(scope)] = scope
            try:
                yield
            finally:
                self._handshakes.pop(id(scope), None)

    async def _keep(self, muxer: Muxer) -> None:
        connections = self.network.connections.get(muxer.peer_id, [])
        if len(connections) > MAX_CONNECTIONS_PER_PEER:
            self._observer.count("errors", code=ResourceError.code)
            muxer.abort()
        with trio.move_on_after(self._deadlines.dial_s):
            await muxer.adopted.wait()
        if not muxer.adopted.is_set():
            muxer.abort()
        await muxer.event_closed.wait()

    async def _take_stream(self, stream: NetStream) -> None:
        """The boundary of an inbound stream: a stranger's fault ends the stream, nothing else."""
        try:
            with trio.fail_after(self._deadlines.negotiate_s):
                chosen, _ = await self._host.multiselect.negotiate(
                    MultiselectCommunicator(stream), ceil(self._deadlines.negotiate_s)
                )
        except STRANGER_FAULTS:
            self._observer.count("errors", code=ProtocolViolation.code)
            chosen = None
        if chosen == PROTOCOL:
            peer = PeerId(str(stream.muxed_conn.peer_id))
            await self._serve(peer, cast(MuxedStream, stream.muxed_stream))
        with trio.move_on_after(self._deadlines.negotiate_s), suppress(*STRANGER_FAULTS):
            await stream.reset()

    # --- outbound --------------------------------------------------------------------------

    async def connect(self, peer: PeerId, address: str) -> Muxer:
        """Make one further connection to a peer, which must prove that PeerID.

        ``dial_peer``, which the library's own ``connect`` uses, would wait a quarter of a second.
        Raises one of STRANGER_FAULTS; the caller sets the deadline.
        """
        identity = ID.from_string(peer)
        connection = cast(SwarmConn, await self.network.dial_addr(Multiaddr(address), identity))
        muxer = cast(Muxer, connection.muxed_conn)
        tune(muxer, self._deadlines)
        return muxer

    async def open_stream(self, muxer: Muxer) -> MuxedStream:
        """Open a stream of our protocol on a connection; raises one of STRANGER_FAULTS."""
        stream = await muxer.open_stream()
        communicator = MultiselectCommunicator(NetStream(stream, None, None))
        await self._host.multiselect_client.select_one_of(
            [PROTOCOL], communicator, ceil(self._deadlines.negotiate_s)
        )
        return stream


class _BoundedConnection(RawConnection):
    """A connection before its handshake: what a stranger claims to send takes no memory."""

    def read(self, n: int | None = None) -> Coroutine[Any, Any, bytes]:
        """Read at most ``n`` bytes, and never many at once; the caller limits the wait."""
        return super().read(_MAX_PIECE_BYTES if n is None else min(n, _MAX_PIECE_BYTES))


def tune(muxer: Muxer, deadlines: Deadlines) -> None:
    """Let the kernel find a dead peer: an idle one by keepalive, a busy one by its silence."""
    sock = muxer.secured_conn.socket
    idle_s = max(1, round(deadlines.session_silence_s / 3))
    stall_ms = round(1000 * deadlines.write_stall_s)
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)


def _make_host(key: NodeKey, deadlines: Deadlines) -> BasicHost:
    from node.transport.noise import NoiseTransport

    pair = create_new_key_pair(key.seed)
    noise = NoiseTransport(pair, noise_privkey=create_noise_key_pair().private_key)
    config = ConnectionConfig(
        min_connections=0,
        low_watermark=0,
        high_watermark=MAX_CONNECTIONS,
        max_connections=MAX_CONNECTIONS,
        max_connections_per_peer=2 * MAX_CONNECTIONS_PER_PEER,
        inbound_upgrade_timeout=deadlines.negotiate_s,
        outbound_upgrade_timeout=deadlines.negotiate_s,
    )
    host = cast(
        BasicHost, new_host(key_pair=pair, sec_opt={NOISE_ID: noise}, connection_config=config)
    )
    network = cast(Swarm, host.get_network())
    network.set_resource_manager(None)  # it leaks a scope for every refused connection
    network.retry_config = RetryConfig(max_retries=0)
    network.upgrader.muxer_multistream = MuxerSelector(
        deadlines.negotiate_s, deadlines.write_stall_s
    )
    # left alone, it dials whomever it has heard of
    vars(network.auto_connector)["maybe_connect"] = trio.lowlevel.checkpoint
    network.notifees.clear()  # identify would open a stream on every connection
    host.multiselect.handlers = {PROTOCOL: None}
    # it prints a traceback for what any peer may do; we count those
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    return host
