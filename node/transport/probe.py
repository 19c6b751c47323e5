"""Greets a node once, without a session: who answers there, and how far its clock is from ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from node.transport.control import CONTROL_CODES, PROBE_SESSION, Refusal
from node.transport.greeting import Greeter
from node.transport.host import STRANGER_FAULTS, HardenedHost
from node.transport.muxer import Muxer
from node.transport.stream import MuxedStream
from protocol.deadlines import Deadlines
from protocol.errors import PeerError
from protocol.keys import NodeKey, PeerId
from protocol.ports import Observer
from protocol.wire import Codec, Limits

_ACCEPTED_OTHERWISE: Refusal = "unknown session"


@dataclass(frozen=True, slots=True)
class Answered:
    """What the node that proved to be ``peer`` said.

    ``clock_offset_s`` is how far its wall clock is ahead of ours; ``refusal`` is None if it would
    take us for a member of its swarm.
    """

    address: str
    clock_offset_s: float
    refusal: Refusal | None


class Prober:
    """Greets nodes with this node's key."""

    def __init__(
        self,
        key: NodeKey,
        swarm: str,
        deadlines: Deadlines,
        observer: Observer,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._key, self._deadlines, self._observer = key, deadlines, observer
        self._greeter = Greeter(swarm, Codec(Limits(max_tensor_bytes=1), CONTROL_CODES), wall_clock)

    async def greet(self, peer: PeerId, addresses: Sequence[str]) -> Answered | None:
        """Return the answer from the first address where ``peer`` proves to be; None if nowhere."""
        host = HardenedHost(self._key, _serve_nobody, self._deadlines, self._observer)
        async with host.running([]):
            for address in addresses:
                with trio.move_on_after(self._deadlines.dial_s):
                    try:
                        return await self._greet(host, peer, address)
                    except (PeerError, *STRANGER_FAULTS):
                        continue
        return None

    async def _greet(self, host: HardenedHost, peer: PeerId, address: str) -> Answered:
        muxer: Muxer = await host.connect(peer, address)
        try:
            stream = await host.open_stream(muxer)
            ack = await self._greeter.ask(stream, PROBE_SESSION, "bulk")
        finally:
            muxer.abort()
        refusal = None if ack.refusal == _ACCEPTED_OTHERWISE else ack.refusal
        return Answered(address, self._greeter.offset_s(ack), refusal)


async def _serve_nobody(_peer: PeerId, stream: MuxedStream) -> None:
    stream.conn.abort()
