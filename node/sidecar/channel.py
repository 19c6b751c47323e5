"""What the daemon and its side-car say to each other: frames of typed requests and replies.

A frame is a 4-byte big-endian length and msgpack ``[call, model]``; replies carry their request's
call number and may come in any order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter, ValidationError

from protocol.errors import SidecarError
from protocol.records import SwarmId

MAX_FRAME_BYTES = 64 * 2**20
_LENGTH = struct.Struct(">I")

T = TypeVar("T")


class Packet(BaseModel):
    """What every request and reply has in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


# --- requests of the daemon ------------------------------------------------------------------


class Start(Packet):
    """The first request: become this DHT node. ``folder`` is private and short (unix sockets)."""

    op: Literal["start"] = "start"
    swarm: SwarmId
    key: bytes = Field(repr=False)
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    bootstrap: tuple[str, ...]
    maps_port: bool
    folder: str
    start_s: PositiveFloat
    dial_s: PositiveFloat


class Publish(Packet):
    """Store a signed node record until it expires."""

    op: Literal["publish"] = "publish"
    record: bytes


class Confirm(Packet):
    """Ask other nodes whether they hold exactly this record."""

    op: Literal["confirm"] = "confirm"
    record: bytes


class Lookup(Packet):
    """Return the signed records of all nodes."""

    op: Literal["lookup"] = "lookup"


class StoreManifest(Packet):
    """Store the signed manifest (TOML) until wall time ``expires_at``."""

    op: Literal["store_manifest"] = "store_manifest"
    text: str
    expires_at: float


class FetchManifest(Packet):
    """Return the signed manifest, if any node has it."""

    op: Literal["fetch_manifest"] = "fetch_manifest"


class Ping(Packet):
    """Ask p2pd whether it lives, and whom it sees."""

    op: Literal["ping"] = "ping"


# --- requests to the averager's process ------------------------------------------------------


class StartAverager(Packet):
    """The first request: start hivemind's DHT for the averager. ``folder`` is as in Start."""

    op: Literal["start_averager"] = "start_averager"
    folder: str
    listen: tuple[str, ...]
    maps_port: bool
    start_s: PositiveFloat


class Average(Packet):
    """Average the fp32 numbers in the file ``buffer``, in place, with the others of ``group``."""

    op: Literal["average"] = "average"
    buffer: str
    num_elements: int
    group: str
    peers: tuple[str, ...]
    num_members: int
    matchmaking_s: PositiveFloat
    allreduce_s: PositiveFloat
    silence_s: PositiveFloat


# --- replies of the side-car -----------------------------------------------------------------


class Pong(Packet):
    """``addresses`` are ours; ``peers`` are those of connected side-cars (full multiaddrs)."""

    reply: Literal["pong"] = "pong"
    addresses: tuple[str, ...]
    peers: tuple[str, ...]
    num_neighbours: int


class Stored(Packet):
    """Whether the DHT took the value."""

    reply: Literal["stored"] = "stored"
    ok: bool


class Confirmed(Packet):
    """How many other nodes were asked and how many hold the record."""

    reply: Literal["confirmed"] = "confirmed"
    num_asked: int
    num_holding: int


class Records(Packet):
    """Signed records, each valid when it was read."""

    reply: Literal["records"] = "records"
    records: tuple[bytes, ...]


class ManifestText(Packet):
    """The signed manifest or None."""

    reply: Literal["manifest"] = "manifest"
    text: str | None


class AveragerUp(Packet):
    """Where other members' averagers reach this one (full multiaddrs)."""

    reply: Literal["averager_up"] = "averager_up"
    addresses: tuple[str, ...]


class Averaged(Packet):
    """What hivemind takes for success; how many members it had."""

    reply: Literal["averaged"] = "averaged"
    num_members: int


class Failure(Packet):
    """The request failed; the side-car goes on."""

    reply: Literal["failure"] = "failure"
    cause: str


Request = Start | Publish | Confirm | Lookup | StoreManifest | FetchManifest | Ping
AveragerRequest = StartAverager | Average
Reply = Pong | Stored | Confirmed | Records | ManifestText | AveragerUp | Averaged | Failure
_CALL: TypeAdapter[int] = TypeAdapter(Annotated[int, Field(strict=True)])
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="op")])
_AVERAGER_REQUEST: TypeAdapter[AveragerRequest] = TypeAdapter(
    Annotated[AveragerRequest, Field(discriminator="op")]
)
_REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="reply")])


def encode(call: int, packet: Packet) -> bytes:
    """Return the frame of a request or reply."""
    body = msgpack.packb([call, packet.model_dump()])
    if len(body) > MAX_FRAME_BYTES:
        raise SidecarError(f"a frame of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + bytes(body)


class Decoder:
    """Cuts a byte stream into frames; raises SidecarError for what is none."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def requests(self, data: bytes) -> Iterator[tuple[int, Request]]:
        """Yield the requests that ``data`` completes."""
        yield from self._packets(data, _REQUEST)

    def averager_requests(self, data: bytes) -> Iterator[tuple[int, AveragerRequest]]:
        """Yield the requests to an averager that ``data`` completes."""
        yield from self._packets(data, _AVERAGER_REQUEST)

    def replies(self, data: bytes) -> Iterator[tuple[int, Reply]]:
        """Yield the replies that ``data`` completes."""
        yield from self._packets(data, _REPLY)

    def _packets(self, data: bytes, kinds: TypeAdapter[T]) -> Iterator[tuple[int, T]]:
        self._buffer += data
        while (body := self._next_body()) is not None:
            try:
                call, packet = msgpack.unpackb(body)
                yield _CALL.validate_python(call), kinds.validate_python(packet)
            except (ValueError, TypeError, ValidationError, msgpack.UnpackException) as error:
                raise SidecarError("the side-car's channel carries nonsense") from error

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_FRAME_BYTES:
            raise SidecarError(f"a frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body
