"""Streams of a hardened yamux connection: many buffers per write, reads into given memory."""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import trio
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import (
    MAX_WINDOW_SIZE,
    TYPE_DATA,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
    YamuxStream,
)

from node.transport.noise import Buffer

if TYPE_CHECKING:
    from node.transport.muxer import Muxer

_HEADER = struct.Struct(YAMUX_HEADER_FORMAT)
# One data frame is four full Noise packets: short enough for control frames to slip between.
_MAX_DATA_BYTES = 4 * MAX_PLAINTEXT_LENGTH
_MAX_READ_BYTES = 4096


class MuxedStream(YamuxStream):
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

    def read(self, n: int | None = None) -> Coroutine[Any, Any, bytes]:
        """py-libp2p's read, used while protocols are negotiated; never many bytes at once.

        The caller limits the wait.
        """
        return super().read(_MAX_READ_BYTES if n is None else min(n, _MAX_READ_BYTES))

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
