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

import trio
from cryptography.exceptions import InvalidTag
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
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
    YamuxStream,
)

from node.transport.noise import Buffer, NoiseSession

_HEADER = struct.Struct(YAMUX_HEADER_FORMAT)
# One data frame is four full Noise packets: short enough for control frames to slip between.
_MAX_DATA_BYTES = 4 * MAX_PLAINTEXT_LENGTH
_MAX_INBOUND_STREAMS = 8
_MAX_CONTROL_BYTES = 64 * 1024
_MAX_SEND_WINDOW = 2**32


class _Misbehaviour(Exception):
    """The peer broke yamux; its connection ends."""


class MuxedStream(YamuxStream):  # type: ignore[misc]
    """A stream that writes many buffers at once and reads into given memory."""

    conn: Muxer

    def __init__(self, stream_id: int, conn: Muxer, is_initiator: bool) -> None:
        super().__init__(stream_id, conn, is_initiator)
        self._released = 0
        self._changed = trio.Event()
        self._target: memoryview | None = None

    # --- writing ---------------------------------------------------------------------------

    async def write_buffers(self, buffers: Sequence[Buffer]) -> None:
        """Send all buffers in order, as fast as the peer's window allows."""
        for pieces, num_bytes in _portions(buffers):
            await self._write_portion(pieces, num_bytes)

    async def _write_portion(self, pieces: list[memoryview], num_bytes: int) -> None:
        while num_bytes:
            await self._window_opens()
            part = min(num_bytes, self.send_window)
            now, pieces = _split(pieces, part)
            self.send_window -= part
            num_bytes -= part
            header = _HEADER.pack(0, TYPE_DATA, 0, self.stream_id, part)
            await self.conn.write_vectors([header, *now])

    async def _window_opens(self) -> None:
        while self.send_window <= 0 and not self.send_closed:
            await self._changed.wait()
        if self.send_closed or self.closed:
            raise MuxedStreamReset("the stream is closed")

    async def write(self, data: bytes) -> None:
        """py-libp2p's write, used while protocols are negotiated."""
        await self.write_buffers([data])

    # --- reading ---------------------------------------------------------------------------

    async def read_into(self, view: memoryview) -> None:
        """Fill ``view`` completely; MuxedStreamEOF or MuxedStreamReset if the stream ends first.

        A cancelled call loses the bytes that it had read: the stream is then good for nothing.
        """
        taken = self._take_buffered(view)
        self._target = view[taken:]
        try:
            while self._target:
                self._raise_if_ended()
                await self._changed.wait()
        finally:
            self._target = None

    def _take_buffered(self, view: memoryview) -> int:
        buffer = self.conn.stream_buffers.get(self.stream_id)
        num_bytes = min(len(buffer), len(view)) if buffer else 0
        if buffer and num_bytes:
            with memoryview(buffer) as held:
                view[:num_bytes] = held[:num_bytes]
            del buffer[:num_bytes]
            self.release(num_bytes)
        return num_bytes

    def _raise_if_ended(self) -> None:
        if self.reset_received:
            raise MuxedStreamReset("the peer reset the stream")
        if self.recv_closed or self.closed:
            raise MuxedStreamEOF("the stream ended")

    async def receive(self, num_bytes: int) -> None:
        """Called by the muxer's reader: take a data frame's body off the connection."""
        while num_bytes:
            if self._target:
                part = self._target[:num_bytes]
                await self.conn.secured_conn.read_into(part)
                self._fill(len(part))
            else:
                part = await self.conn.secured_conn.read_some(num_bytes)
                self._place(part)
            num_bytes -= len(part)

    def _place(self, part: memoryview) -> None:
        """Give bytes to a reader that came meanwhile; hold those that nobody has asked for."""
        wanted = self._target[: len(part)] if self._target else part[:0]
        if wanted:
            wanted[:] = part[: len(wanted)]
            self._fill(len(wanted))
        if len(part) > len(wanted):
            self.conn.keep(self.stream_id, part[len(wanted) :])
            self.wake()

    def _fill(self, num_bytes: int) -> None:
        self.release(num_bytes)
        if self._target is not None:
            self._target = self._target[num_bytes:]
            if not self._target:
                self.wake()

    async def _auto_tune_and_send_window_update(self, *, bytes_read: int = 0) -> None:
        self.release(bytes_read)

    def release(self, num_bytes: int) -> None:
        """Give the peer back the window of bytes that were consumed, half a window at a time."""
        self._released += num_bytes
        if self._released * 2 >= self.target_recv_window:
            self.recv_window += self._released
            self.conn.post(TYPE_WINDOW_UPDATE, 0, self.stream_id, self._released)
            self._released = 0

    def widen(self, window_bytes: int) -> None:
        """Let the peer have up to ``window_bytes`` under way."""
        self._released += max(0, min(window_bytes, MAX_WINDOW_SIZE) - self.target_recv_window)
        self.target_recv_window = min(max(window_bytes, self.target_recv_window), MAX_WINDOW_SIZE)
        self.recv_window += self._released
        self.conn.post(TYPE_WINDOW_UPDATE, 0, self.stream_id, self._released)
        self._released = 0

    def wake(self) -> None:
        """Let those who wait for the stream look at it again."""
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    def end(self) -> None:
        """The connection is gone: nobody may wait for this stream any more."""
        self.closed = self.send_closed = self.recv_closed = self.reset_received = True
        self.wake()


class Muxer(Yamux):  # type: ignore[misc]
    """One connection's streams. ``adopted`` is set once a session (or the end) has claimed it."""

    secured_conn: NoiseSession
    streams: dict[int, MuxedStream]

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
            with trio.move_on_after(self._stall_s, shield=True) as scope:
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
            with trio.move_on_after(self._stall_s, shield=True):
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
        with suppress(BaseLibp2pError, OSError, InvalidTag, _Misbehaviour):
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


class MuxerSelector(MuxerMultistream):  # type: ignore[misc]
    """Negotiates yamux and nothing else, and answers with our muxer."""

    def __init__(self, negotiate_s: float, stall_s: float) -> None:
        super().__init__({TProtocol(PROTOCOL_ID): Muxer}, negotiate_s)
        self._stall_s = stall_s

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Negotiate over a secured connection."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return self._annotate_connection(Muxer(conn, peer_id, self._stall_s), conn, protocol)


def _portions(buffers: Sequence[Buffer]) -> list[tuple[list[memoryview], int]]:
    """Group buffers, without copying, into portions of at most one data frame."""
    portions: list[tuple[list[memoryview], int]] = []
    pieces: list[memoryview] = []
    num_bytes = 0
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            part = view[: _MAX_DATA_BYTES - num_bytes]
            pieces.append(part)
            num_bytes += len(part)
            view = view[len(part) :]
            if num_bytes == _MAX_DATA_BYTES:
                portions.append((pieces, num_bytes))
                pieces, num_bytes = [], 0
    return [*portions, (pieces, num_bytes)] if pieces else portions


def _split(pieces: list[memoryview], num_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """Cut a list of pieces after ``num_bytes``."""
    now: list[memoryview] = []
    for index, piece in enumerate(pieces):
        if len(piece) > num_bytes:
            return [*now, piece[:num_bytes]], [piece[num_bytes:], *pieces[index + 1 :]]
        now.append(piece)
        num_bytes -= len(piece)
        if not num_bytes:
            return now, pieces[index + 1 :]
    return now, []
