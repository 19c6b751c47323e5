"""One lane of a session: a stream with one writer, one reader and acknowledgements both ways.

A frame counts as delivered when the core on the other side has taken it. Until then it uses up
the sender's credit, so a slow core holds back its peers while the reader still drains the stream
into memory, which the same credit bounds. Acknowledgements are cumulative and ride on whatever
frame goes the other way; alone they go only when there is none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import trio
from pydantic import BaseModel

from node.transport.allowance import Allowance
from node.transport.control import CONTROL_CODES, Ack, ControlFrame
from node.transport.shield import shielded
from node.transport.stream import MuxedStream
from node.transport.throughput import Throughput
from protocol.errors import PeerGone, ProtocolViolation
from protocol.messages import Lane as LaneName
from protocol.messages import Message
from protocol.ports import Observer, Tensor
from protocol.wire import MEBIBYTE, PREFIX_BYTES, Buffer, Codec, Frame, Opened, Prefix

# Checksums of larger payloads are taken in a thread: they would hold up every other session.
_THREAD_BYTES = 4 * MEBIBYTE

Deliver = Callable[[Message, tuple[Tensor, ...]], Awaitable[None]]


@dataclass(slots=True, eq=False)
class _Parcel:
    """A frame on its way out; ``sequence`` 0 until it is being written."""

    frame: Frame
    is_counted: bool
    sequence: int = 0
    began_at: float = 0.0
    is_withdrawn: bool = False
    is_delivered: bool = False
    written: trio.Event = field(default_factory=trio.Event)
    settled: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class _Arrival:
    message: Message
    tensors: tuple[Tensor, ...]
    sequence: int
    num_bytes: int


class Lane:
    """A stream and its two directions. ``fail`` must be called once when the session ends."""

    def __init__(
        self,
        name: LaneName,
        stream: MuxedStream,
        codec: Codec,
        credit_bytes: int,
        observer: Observer,
        allowance: Allowance,
    ) -> None:
        self.name, self._allowance = name, allowance
        self.stream, self._codec, self._observer = stream, codec, observer
        self._credit_bytes = credit_bytes
        self.bytes_in = self.bytes_out = 0
        self.throughput, self.rtt_s = Throughput(), 0.0
        self._failure: str | None = None
        # outbound
        self._turn = trio.Lock()
        self._queue: deque[_Parcel] = deque()
        self._wake_writer = trio.Event()
        self._unacknowledged: deque[_Parcel] = deque()
        self._outstanding_bytes = 0
        self._credit_changed = trio.Event()
        self._num_written = 0
        # inbound
        self._num_received = self._num_taken = self._num_acknowledged = 0
        self._arrivals: deque[_Arrival] = deque()
        self._arrived = trio.Event()
        self._held_bytes = 0
        self._ack = codec.encode(Ack())

    # --- sending ---------------------------------------------------------------------------

    async def send(self, frame: Frame, stall_s: float) -> None:
        """Return when the peer's core has taken the frame; PeerGone if the session ends first.

        If the caller is cancelled, a frame that is being written is written to its end, for
        ``stall_s`` at most: its tensors belong to the caller again afterwards.
        """
        parcel = _Parcel(frame, is_counted=True)
        async with self._turn:
            await self._await_credit(frame.num_bytes)
            self._outstanding_bytes += frame.num_bytes
            self._enqueue(parcel)
        try:
            await parcel.settled.wait()
        except trio.Cancelled:
            await self._withdraw(parcel, stall_s)
            raise
        if not parcel.is_delivered:
            raise PeerGone(self._failure or "the session ended")

    def post(self, frame: Frame) -> None:
        """Send a frame that is neither counted nor acknowledged, if the writer is not behind."""
        if not self._queue:
            self._enqueue(_Parcel(frame, is_counted=False))

    async def _await_credit(self, num_bytes: int) -> None:
        while self._failure is None:
            if not self._outstanding_bytes:
                return
            if self._outstanding_bytes + num_bytes <= self._credit_bytes:
                return
            await self._credit_changed.wait()
        raise PeerGone(self._failure)

    def _enqueue(self, parcel: _Parcel) -> None:
        self._queue.append(parcel)
        self._wake_writer.set()

    async def _withdraw(self, parcel: _Parcel, stall_s: float) -> None:
        if not parcel.sequence:
            parcel.is_withdrawn = True
            self._spend(-parcel.frame.num_bytes)
            return
        with shielded(stall_s) as scope:
            await parcel.written.wait()
        if scope.cancelled_caught:
            self.stream.conn.abort()

    def _spend(self, num_bytes: int) -> None:
        self._outstanding_bytes += num_bytes
        changed, self._credit_changed = self._credit_changed, trio.Event()
        changed.set()

    async def write_loop(self) -> None:
        """Write what is queued, and acknowledgements when nothing is."""
        while True:
            if self._queue:
                parcel = self._queue.popleft()
                if not parcel.is_withdrawn:
                    await self._write(parcel)
            elif self._num_taken > self._num_acknowledged:
                await self._write(_Parcel(self._ack, is_counted=False))
            else:
                self._wake_writer = trio.Event()
                await self._wake_writer.wait()

    async def _write(self, parcel: _Parcel) -> None:
        if parcel.is_counted:
            self._num_written += 1
            parcel.sequence, parcel.began_at = self._num_written, trio.current_time()
            self._unacknowledged.append(parcel)
        self._num_acknowledged = self._num_taken
        frame = parcel.frame
        await self.stream.write_buffers(frame.buffers(parcel.sequence, self._num_acknowledged))
        parcel.written.set()
        if parcel.is_counted:
            self._allowance.earn()
        self.bytes_out += frame.num_bytes
        self._count(frame.kind, frame.num_bytes, "out")

    # --- receiving -------------------------------------------------------------------------

    async def read_loop(self, on_control: Callable[[ControlFrame], None]) -> None:
        """Drain the stream into memory, within the credit."""
        start = bytearray(PREFIX_BYTES)
        while True:
            await self.stream.read_into(memoryview(start))
            prefix = self._codec.open_prefix(start)
            self._check(prefix)
            header = bytearray(prefix.header_bytes)
            await self.stream.read_into(memoryview(header))
            opened = self._codec.open_header(prefix, header)
            payload = _room_for(prefix.payload_bytes)
            await self.stream.read_into(payload)
            tensors = await self._open(prefix, header, opened, payload)
            self._settle(prefix.acknowledged)
            self._take(prefix, opened.message, tensors, on_control)

    def _check(self, prefix: Prefix) -> None:
        self._allowance.take(prefix)
        is_control = prefix.code in CONTROL_CODES
        if prefix.sequence != (0 if is_control else self._num_received + 1):
            raise ProtocolViolation(f"frame {prefix.sequence} follows frame {self._num_received}")
        if self._held_bytes and self._held_bytes + prefix.num_bytes > self._credit_bytes:
            raise ProtocolViolation("sent past its credit")

    async def _open(
        self, prefix: Prefix, header: bytearray, opened: Opened, payload: memoryview
    ) -> tuple[Tensor, ...]:
        if prefix.payload_bytes < _THREAD_BYTES:
            return self._codec.open_payload(prefix, header, opened, payload)
        return await trio.to_thread.run_sync(
            self._codec.open_payload, prefix, header, opened, payload
        )

    def _take(
        self,
        prefix: Prefix,
        message: BaseModel,
        tensors: tuple[Tensor, ...],
        on_control: Callable[[ControlFrame], None],
    ) -> None:
        self.bytes_in += prefix.num_bytes
        self._count(self._codec.kind(prefix.code), prefix.num_bytes, "in")
        if isinstance(message, ControlFrame):
            on_control(message)
        elif isinstance(message, Message):
            if message.lane != self.name:
                raise ProtocolViolation(f"{message.kind} came on the wrong lane")
            self._num_received += 1
            self._held_bytes += prefix.num_bytes
            self._arrivals.append(_Arrival(message, tensors, prefix.sequence, prefix.num_bytes))
            self._arrived.set()

    async def deliver_loop(self, deliver: Deliver) -> None:
        """Hand arrivals to the core one by one; each is acknowledged once it was taken."""
        while True:
            while self._arrivals:
                arrival = self._arrivals.popleft()
                await deliver(arrival.message, arrival.tensors)
                self._held_bytes -= arrival.num_bytes
                self._num_taken = arrival.sequence
                self._wake_writer.set()
            self._arrived = trio.Event()
            await self._arrived.wait()

    def _settle(self, acknowledged: int) -> None:
        if acknowledged > self._num_written:
            raise ProtocolViolation("acknowledges what was never sent")
        settled_bytes, began_at = 0, math.inf
        while self._unacknowledged and self._unacknowledged[0].sequence <= acknowledged:
            parcel = self._unacknowledged.popleft()
            settled_bytes += parcel.frame.num_bytes
            began_at = min(began_at, parcel.began_at)
            parcel.is_delivered = True
            parcel.settled.set()
        if settled_bytes:
            now = trio.current_time()
            self.throughput.acknowledged(settled_bytes, began_at, now, self.rtt_s)
            self._spend(-settled_bytes)

    # --- the end ---------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """The session is over: whoever still waits gets PeerGone."""
        self._failure = reason
        for parcel in (*self._queue, *self._unacknowledged):
            parcel.written.set()
            parcel.settled.set()
        self._spend(0)
        self._arrivals.clear()

    def _count(self, kind: str, num_bytes: int, direction: str) -> None:
        self._observer.count("frames", kind=kind, direction=direction)
        self._observer.count("bytes", num_bytes, kind=kind, direction=direction)


def _room_for(num_bytes: int) -> memoryview:
    """Memory that is not written: the kernel gives it as it fills, not when it is claimed."""
    return memoryview(cast(Buffer, torch.empty(num_bytes, dtype=torch.uint8).numpy()))
