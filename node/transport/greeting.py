"""How two nodes meet: who may talk, and which of two simultaneous dials wins."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from node.transport.control import Hello, HelloAck, Refusal, receive_greeting, send_greeting
from node.transport.stream import MuxedStream
from protocol.errors import PeerGone, ProtocolViolation
from protocol.messages import PROTOCOL_VERSION, Lane
from protocol.wire import Codec

CLOCK_WARN_S = 2.0
CLOCK_REFUSE_S = 30.0

_REASONS: dict[Refusal, str] = {
    "version": "the peer speaks another protocol version",
    "swarm": "the peer belongs to another swarm",
    "clock": f"the clocks differ by more than {CLOCK_REFUSE_S:.0f} s",
    "dialling": "the peer is dialling us",
    "full": "the peer takes no more sessions",
    "unknown session": "the peer does not know this session",
}


class Refused(PeerGone):
    """The peer answered the greeting with a refusal."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(_REASONS[refusal])
        self.refusal = refusal


@dataclass(frozen=True)
class Greeter:
    """Speaks and judges greetings for one node of one swarm."""

    swarm: str
    codec: Codec
    wall_clock: Callable[[], float]
    instance: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    async def greet(self, stream: MuxedStream, session: bytes, lane: Lane) -> HelloAck:
        """Introduce a stream; Refused if the peer does not want it."""
        answer = await self.ask(stream, session, lane)
        if answer.refusal is not None:
            raise Refused(answer.refusal)
        return answer

    async def ask(self, stream: MuxedStream, session: bytes, lane: Lane) -> HelloAck:
        """Introduce a stream and return the answer, a refusal too."""
        hello = Hello(
            version=PROTOCOL_VERSION,
            swarm=self.swarm,
            instance=self.instance,
            session=session,
            lane=lane,
            wall_time_s=self.wall_clock(),
        )
        await send_greeting(stream, self.codec, hello)
        answer = await receive_greeting(stream, self.codec)
        if not isinstance(answer, HelloAck):
            raise ProtocolViolation("a hello was answered with a hello")
        return answer

    async def receive(self, stream: MuxedStream) -> Hello:
        """Read the dialler's introduction."""
        hello = await receive_greeting(stream, self.codec)
        if not isinstance(hello, Hello):
            raise ProtocolViolation("a stream began with the answer to a hello")
        return hello

    async def answer(self, stream: MuxedStream, refusal: Refusal | None = None) -> None:
        """Accept or refuse a stream."""
        ack = HelloAck(instance=self.instance, wall_time_s=self.wall_clock(), refusal=refusal)
        await send_greeting(stream, self.codec, ack)

    def judge(self, hello: Hello) -> Refusal | None:
        """Refuse whoever cannot be in this swarm now."""
        if hello.version != PROTOCOL_VERSION:
            return "version"
        if hello.swarm != self.swarm:
            return "swarm"
        if abs(self.offset_s(hello)) > CLOCK_REFUSE_S:
            return "clock"
        return None

    def offset_s(self, greeting: Hello | HelloAck) -> float:
        """How far the peer's wall clock is ahead of ours."""
        return greeting.wall_time_s - self.wall_clock()
