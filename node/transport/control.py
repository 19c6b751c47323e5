"""The transport's own frames: greeting, acknowledgement, heartbeat. The core never sees them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from node.transport.stream import MuxedStream
from protocol.errors import ProtocolViolation
from protocol.messages import Count, Digest, Lane
from protocol.wire import PREFIX_BYTES, Codec

Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
# Of whoever asks who is there: it names no session, so the peer answers and nothing begins.
PROBE_SESSION = bytes(16)
Refusal = Literal["version", "swarm", "clock", "dialling", "full", "unknown session"]


class ControlFrame(BaseModel):
    """What all of them share; none carries a tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str


class Hello(ControlFrame):
    """First frame of the dialler on each stream. ``instance`` names the process, ``session`` the
    pair of streams; who speaks is what the connection proved, so no frame says it.
    """

    kind: Literal["hello"] = "hello"
    version: Count
    swarm: Digest
    instance: Nonce
    session: Nonce
    lane: Lane
    wall_time_s: Seconds


class HelloAck(ControlFrame):
    """The answer; with a refusal the stream ends."""

    kind: Literal["hello_ack"] = "hello_ack"
    instance: Nonce
    wall_time_s: Seconds
    refusal: Refusal | None = None


class Ack(ControlFrame):
    """Carries the prefix's acknowledgement when there is nothing else to send."""

    kind: Literal["ack"] = "ack"


class Beat(ControlFrame):
    """A heartbeat. ``echo_s`` is the other side's last ``sent_s``, held for ``held_s`` seconds.

    ``bytes_per_s``: what the sender's large frames to the receiver reach, if that is known.
    """

    kind: Literal["beat"] = "beat"
    step: Count
    last_finished_s_ago: Annotated[Seconds, Field(ge=0)] | None
    record_seen: Count
    sent_s: Seconds
    echo_s: Seconds | None
    held_s: Seconds
    bytes_per_s: Annotated[Seconds, Field(gt=0)] | None = None


CONTROL_CODES: dict[int, type[BaseModel]] = {240: Hello, 241: HelloAck, 242: Ack, 243: Beat}


async def send_greeting(stream: MuxedStream, codec: Codec, message: Hello | HelloAck) -> None:
    """Write one greeting; the caller sets the deadline."""
    await stream.write_buffers(codec.encode(message).buffers())


async def receive_greeting(stream: MuxedStream, codec: Codec) -> BaseModel:
    """Read the one frame that may stand before a session; the caller sets the deadline."""
    start = bytearray(PREFIX_BYTES)
    await stream.read_into(memoryview(start))
    prefix = codec.open_prefix(start)
    if CONTROL_CODES.get(prefix.code) not in (Hello, HelloAck):
        raise ProtocolViolation("the first frame is not a greeting")
    header = bytearray(prefix.header_bytes)
    await stream.read_into(memoryview(header))
    opened = codec.open_header(prefix, header)
    codec.open_payload(prefix, header, opened, bytearray())
    return opened.message
