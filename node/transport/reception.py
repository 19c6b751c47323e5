"""The peer's side of making a session: inbound streams are greeted and paired."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import trio

from node.transport.control import PROBE_SESSION, Hello, Refusal
from node.transport.dialling import Meeting
from node.transport.greeting import Greeter
from node.transport.host import STRANGER_FAULTS
from node.transport.stream import MuxedStream
from protocol.deadlines import Deadlines
from protocol.errors import PeerError, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import Lane
from protocol.ports import Observer


@dataclass(eq=False)
class _Half:
    """A session whose control lane has greeted and whose bulk lane has not yet."""

    hello: Hello
    stream: MuxedStream
    clock_offset_s: float
    is_paired: bool = False
    settled: trio.Event = field(default_factory=trio.Event)


class Reception:
    """Serves inbound streams: ``judge`` may refuse a peer, ``begin`` gets complete meetings."""

    def __init__(
        self,
        greeter: Greeter,
        judge: Callable[[PeerId], Refusal | None],
        begin: Callable[[Meeting], None],
        deadlines: Deadlines,
        observer: Observer,
    ) -> None:
        self._greeter, self._judge, self._begin = greeter, judge, begin
        self._deadlines, self._observer = deadlines, observer
        self._halves: dict[PeerId, _Half] = {}

    async def serve(self, peer: PeerId, stream: MuxedStream) -> None:
        """Greet one stream and stay until its connection ends; faults go no further."""
        try:
            with trio.fail_after(self._deadlines.negotiate_s):
                hello = await self._greeter.receive(stream)
                half = self._half_for(peer, hello, stream)
                await self._greeter.answer(stream, half if isinstance(half, str) else None)
        except (PeerError, *STRANGER_FAULTS) as error:
            code = error.code if isinstance(error, PeerError) else ProtocolViolation.code
            self._observer.count("errors", code=code)
            stream.conn.abort()
            return
        if isinstance(half, str):
            self._tell_refused(peer, hello, half)
            return
        stream.conn.adopted.set()
        if hello.lane == "bulk":
            self._pair(peer, half, stream)
        else:
            await self._await_bulk(peer, half)
        await stream.conn.event_closed.wait()

    def _tell_refused(self, peer: PeerId, hello: Hello, reason: Refusal) -> None:
        """Who only asked whether we are there gets what it came for: it is not told as a fault."""
        if reason == "unknown session" and hello.session == PROBE_SESSION:
            self._observer.event("peer_probed", peer=peer)
        else:
            self._observer.event("peer_refused", peer=peer, reason=reason)

    @property
    def peers(self) -> Collection[PeerId]:
        """Those that are making a session with us."""
        return self._halves.keys()

    def pending(self, peer: PeerId) -> trio.Event | None:
        """While the peer is making a session with us: what is set when it has one or gave up."""
        half = self._halves.get(peer)
        return half.settled if half else None

    def _half_for(self, peer: PeerId, hello: Hello, stream: MuxedStream) -> _Half | Refusal:
        """Return the session in the making that a stream belongs to, or why it is refused."""
        if refusal := self._greeter.judge(hello):
            return refusal
        half = self._halves.get(peer)
        if hello.lane == "bulk":
            if half is None or half.hello.session != hello.session:
                return "unknown session"
            return self._halves.pop(peer)
        if refusal := self._judge(peer):
            return refusal
        if half is not None:
            half.stream.conn.abort()
        self._halves[peer] = _Half(hello, stream, self._greeter.offset_s(hello))
        return self._halves[peer]

    def _pair(self, peer: PeerId, half: _Half, bulk: MuxedStream) -> None:
        half.is_paired = True
        half.settled.set()
        streams: dict[Lane, MuxedStream] = {"control": half.stream, "bulk": bulk}
        self._begin(Meeting(peer, streams, False, half.clock_offset_s))

    async def _await_bulk(self, peer: PeerId, half: _Half) -> None:
        """Wait for the other lane; give up when it takes too long or the first one is lost."""
        with trio.move_on_after(self._deadlines.dial_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_settle_at_end, half)
                await half.settled.wait()
                nursery.cancel_scope.cancel()
        if not half.is_paired:
            half.stream.conn.abort()
            half.settled.set()
            if self._halves.get(peer) is half:
                del self._halves[peer]


async def _settle_at_end(half: _Half) -> None:
    await half.stream.conn.event_closed.wait()
    half.settled.set()
