"""Yamux, hardened: nothing that a peer sends can grow memory, block the reader or raise past it.

Differences from py-libp2p's class, each with a test in tests/network/test_host_defects.py:

- a frame write is shielded and bounded: cancelling a caller cannot cut a frame in half, and a
  peer that stops reading costs the connection after ``stall_s`` instead of a task for ever;
- a peer that sends past its receive window is cut off;
- the reader never writes: window updates and pongs go out with the next frame or by a task of
  their own, so two saturated directions cannot wait for each other;
- a reader gives the memory that it wants filled (``read_into``): bytes are decrypted once and
  copied once, and a large frame wakes the reader once instead of sixteen times per MiB.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from math import ceil

import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_ACK,
    FLAG_FIN,
    FLAG_RST,
    FLAG_SYN,
    HEADER_SIZE,
    MAX_WINDOW_SIZE,
    PROTOCOL_ID,
    TYPE_DATA,
    TYPE_GO_AWAY,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
    Yamux,
)

from node.transport.noise import Buffer, NoiseSession
from node.transport.shield import shielded
from node.transport.stream import MuxedStream

_HEADER = struct.Struct(YAMUX_HEADER_FORMAT)
_MAX_INBOUND_STREAMS = 8
_MAX_CONTROL_BYTES = 64 * 1024
_MAX_SEND_WINDOW = 2**32


class _Misbehaviour(Exception):
    """The peer broke yamux; its connection ends."""


class Muxer(Yamux):
    """One connection's streams. ``adopted`` is set once a session (or the end) has claimed it."""

    secured_conn: NoiseSession
    streams: dict[int, MuxedStream]  # type: ignore[assignment]

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, stall_s: float) -> None:
        super().__init__(secured_conn, peer_id)
        self.adopted = trio.Event()
        self._stall_s = stall_s
        self._posted = bytearray()
        self._posted_event = trio.Event()

    def abort(self) -> None:
        """End the connection at once, whatever the peer does."""
        self.secured_conn.abort()

    # --- writing ---------------------------------------------------------------------------

    async def write_vectors(self, buffers: Sequence[Buffer]) -> None:
        """Write buffers without interruption; posted control frames go first."""
        async with self._write_lock:
            posted, self._posted = self._posted, bytearray()
            with shielded(self._stall_s) as scope:
                await self.secured_conn.write_vectors([posted, *buffers] if posted else buffers)
            if scope.cancelled_caught:
                self.abort()
                raise RawConnError("connection closed: write stalled")

    async def _write_frame(self, data: bytes) -> None:
        await self.write_vectors([data])

    def post(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        """Send a frame without data soon; never blocks."""
        if len(self._posted) > _MAX_CONTROL_BYTES:
            self.abort()  # it asks for answers and does not read them
            return
        self._posted += _HEADER.pack(0, kind, flags, stream_id, value)
        self._posted_event.set()

    async def _write_posted(self) -> None:
        while True:
            await self._posted_event.wait()
            self._posted_event = trio.Event()
            if self._posted:
                await self.write_vectors([])

    async def open_stream(self) -> MuxedStream:
        """Open a stream to the peer."""
        if self.event_shutting_down.is_set():
            raise MuxedStreamError("the connection is closing")
        stream = MuxedStream(self.next_stream_id, self, True)
        self.next_stream_id += 2
        self._add(stream)
        self.post(TYPE_WINDOW_UPDATE, FLAG_SYN, stream.stream_id, 0)
        return stream

    def _add(self, stream: MuxedStream) -> None:
        self.streams[stream.stream_id] = stream
        self.stream_buffers[stream.stream_id] = bytearray()
        self.stream_events[stream.stream_id] = trio.Event()

    # --- reading ---------------------------------------------------------------------------

    async def handle_incoming(self) -> None:
        """Read frames until the connection ends, by whoever's fault."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._run_writer, nursery.cancel_scope)
                await self._read_frames()
                nursery.cancel_scope.cancel()
        finally:
            self._end_streams()
            with shielded(self._stall_s):
                await self._cleanup_on_error()

    async def close(self, error_code: int = 0) -> None:
        """Tell the peer that we leave, then end the connection."""
        self._end_streams()
        await super().close(error_code)

    async def _run_writer(self, scope: trio.CancelScope) -> None:
        with suppress(BaseLibp2pError, OSError):
            await self._write_posted()
        scope.cancel()

    async def _read_frames(self) -> None:
        header = memoryview(bytearray(HEADER_SIZE))
        with suppress(BaseLibp2pError, OSError, _Misbehaviour):
            while not self.event_shutting_down.is_set():
                await self.secured_conn.read_into(header)
                version, kind, flags, stream_id, value = _HEADER.unpack(header)
                if version != 0 or kind == TYPE_GO_AWAY:
                    return
                await self._take(kind, flags, stream_id, value)

    async def _take(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        if kind == TYPE_PING:
            self._take_ping(flags, value)
            return
        if kind not in (TYPE_DATA, TYPE_WINDOW_UPDATE):
            raise _Misbehaviour(f"unknown frame type {kind}")
        if flags & FLAG_SYN:
            self._accept(stream_id)
        stream = self.streams.get(stream_id)
        if kind == TYPE_DATA:
            await self._take_data(stream, value)
        elif stream is not None:
            stream.send_window = min(stream.send_window + value, _MAX_SEND_WINDOW)
            stream.wake()
        if stream is not None and flags & (FLAG_FIN | FLAG_RST):
            self._take_end(stream, flags)

    async def _take_data(self, stream: MuxedStream | None, num_bytes: int) -> None:
        if stream is None:
            if num_bytes > MAX_WINDOW_SIZE:
                raise _Misbehaviour("a frame larger than any window")
            while num_bytes:
                num_bytes -= len(await self.secured_conn.read_some(num_bytes))
            return
        stream.recv_window -= num_bytes
        if stream.recv_window < 0:
            raise _Misbehaviour("sent past its receive window")
        await stream.receive(num_bytes)

    def keep(self, stream_id: int, data: memoryview) -> None:
        """Hold bytes that nobody has asked for yet; the receive window bounds them."""
        buffer = self.stream_buffers.get(stream_id)
        if buffer is not None:
            buffer += data
            self.stream_events[stream_id].set()

    def _accept(self, stream_id: int) -> None:
        is_theirs = (stream_id % 2 == 1) != self.is_initiator_value
        if not is_theirs or stream_id in self.streams:
            raise _Misbehaviour("opened a stream that is not its to open")
        num_inbound = sum(not stream.is_initiator for stream in self.streams.values())
        stream = MuxedStream(stream_id, self, False)
        if num_inbound >= _MAX_INBOUND_STREAMS:
            self.post(TYPE_WINDOW_UPDATE, FLAG_RST, stream_id, 0)
            return
        try:
            self.new_stream_send_channel.send_nowait(stream)
        except trio.WouldBlock:
            self.post(TYPE_WINDOW_UPDATE, FLAG_RST, stream_id, 0)
            return
        self._add(stream)
        self.post(TYPE_WINDOW_UPDATE, FLAG_ACK, stream_id, 0)

    def _take_end(self, stream: MuxedStream, flags: int) -> None:
        stream.recv_closed = True
        if flags & FLAG_RST:
            stream.closed = stream.send_closed = stream.reset_received = True
        stream.closed = stream.closed or stream.send_closed
        self.stream_events[stream.stream_id].set()
        stream.wake()
        if stream.closed:
            self._finalize_stream_locked(stream, fully_closed=True)

    def _take_ping(self, flags: int, value: int) -> None:
        if flags & FLAG_SYN:
            self.post(TYPE_PING, FLAG_ACK, 0, value)
        elif flags & FLAG_ACK:
            self._ping_event.set()

    def _end_streams(self) -> None:
        self.adopted.set()
        for stream in list(self.streams.values()):
            stream.end()


class MuxerSelector(MuxerMultistream):
    """Negotiates yamux and nothing else, and answers with our muxer."""

    def __init__(self, negotiate_s: float, stall_s: float) -> None:
        super().__init__({TProtocol(PROTOCOL_ID): Muxer}, ceil(negotiate_s))
        self._stall_s = stall_s

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Negotiate over a secured connection."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(Muxer(conn, peer_id, self._stall_s), conn, protocol)
