"""One session with one peer: two lanes, heartbeats, and the boundary where its faults end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
from libp2p.exceptions import BaseLibp2pError

from node.transport.control import Ack, Beat, ControlFrame
from node.transport.lane import Deliver, Lane
from protocol.deadlines import Deadlines
from protocol.errors import PeerError, PeerTimeout, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import Lane as LaneName
from protocol.ports import Observer
from protocol.wire import Codec, Frame

# What a peer or the network between us can do to a session. Anything else is a bug of ours.
SESSION_FAULTS = (
    PeerError, BaseLibp2pError, OSError, EOFError, trio.BrokenResourceError,
    trio.ClosedResourceError,
)  # fmt: skip
_RTT_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a node says of itself about once a second.

    ``record_seen`` is the highest sequence number of the receiver's own record that the sender
    has read in the registry, 0 for none.
    """

    step: int
    last_finished_s_ago: float | None = None
    record_seen: int = 0


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A session as ``status`` and ``peers`` show it."""

    peer: PeerId
    address: str
    is_dialler: bool
    connected_s: float
    rtt_s: float | None
    clock_offset_s: float
    bytes_in: int
    bytes_out: int
    heartbeat: Heartbeat | None
    heartbeat_s_ago: float | None


class Session:
    """Runs until its peer, the network or ``end`` ends it.

    Its owner sets ``finished`` when the core knows of the end.
    """

    def __init__(
        self,
        peer: PeerId,
        lanes: dict[LaneName, Lane],
        *,
        is_dialler: bool,
        clock_offset_s: float,
        codec: Codec,
        deadlines: Deadlines,
        observer: Observer,
    ) -> None:
        self.peer, self.lanes = peer, lanes
        self.finished = trio.Event()
        self.reason = "the session ended"
        self.rtt_s: float | None = None
        self._is_dialler, self._clock_offset_s = is_dialler, clock_offset_s
        self._codec, self._deadlines, self._observer = codec, deadlines, observer
        self._scope = trio.CancelScope()
        self._started_at = trio.current_time()
        self._beat: Beat | None = None
        self._beat_at = 0.0

    async def send(self, frame: Frame, lane: LaneName) -> None:
        """Return when the peer's core has taken the frame; PeerGone if the session ends first."""
        await self.lanes[lane].send(frame, self._deadlines.write_stall_s)

    def end(self, reason: str) -> None:
        """Stop the session; may be called at any time, more than once."""
        self.reason = reason
        self._scope.cancel()

    async def run(
        self,
        announce: Callable[[], Awaitable[None]],
        deliver: Deliver,
        heartbeat: Callable[[PeerId], Heartbeat],
        on_heartbeat: Callable[[PeerId, Heartbeat], None],
    ) -> None:
        """Serve the session; a peer's fault is noted as ``reason`` and goes no further.

        ``announce`` is awaited before the first delivery.
        """

        def on_control(frame: ControlFrame) -> None:
            if isinstance(frame, Beat):
                on_heartbeat(self.peer, self._take_beat(frame))
            elif not isinstance(frame, Ack):
                raise ProtocolViolation(f"a {frame.kind} inside a session")

        async def deliver_all() -> None:
            await announce()
            async with trio.open_nursery() as inner:
                for lane in self.lanes.values():
                    inner.start_soon(lane.deliver_loop, deliver)

        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(deliver_all)
                    nursery.start_soon(self._watch, heartbeat)
                    for lane in self.lanes.values():
                        nursery.start_soon(lane.write_loop)
                        nursery.start_soon(lane.read_loop, on_control)
        except* SESSION_FAULTS as group:
            self._note(_first(group))
        finally:
            self._finish()

    def _note(self, fault: BaseException) -> None:
        code = fault.code if isinstance(fault, PeerError) else "peer_gone"
        self.reason = str(fault) or "the connection was lost"
        self._observer.count("errors", code=code)

    def _finish(self) -> None:
        for lane in self.lanes.values():
            lane.stream.conn.abort()
            lane.fail(f"{self.peer}: {self.reason}")

    # --- heartbeats ------------------------------------------------------------------------

    async def _watch(self, heartbeat: Callable[[PeerId], Heartbeat]) -> None:
        """Send heartbeats, and end the session when nothing at all arrives for too long."""
        heard, heard_at = 0, trio.current_time()
        while True:
            self._send_beat(heartbeat(self.peer))
            woke_at = trio.current_time()
            await trio.sleep(self._deadlines.heartbeat_s)
            now = trio.current_time()
            num_bytes = sum(lane.bytes_in for lane in self.lanes.values())
            # a node that was itself frozen has not listened: its peers get another chance
            if num_bytes != heard or now - woke_at > 2 * self._deadlines.heartbeat_s:
                heard, heard_at = num_bytes, now
            elif now - heard_at > self._deadlines.session_silence_s:
                raise PeerTimeout(f"silent for {now - heard_at:.1f} s")

    def _send_beat(self, mine: Heartbeat) -> None:
        now = trio.current_time()
        beat = Beat(
            step=mine.step,
            last_finished_s_ago=mine.last_finished_s_ago,
            record_seen=mine.record_seen,
            sent_s=now,
            echo_s=self._beat.sent_s if self._beat else None,
            held_s=now - self._beat_at if self._beat else 0.0,
            bytes_per_s=self.lanes["bulk"].throughput.bytes_per_s,
        )
        self.lanes["control"].post(self._codec.encode(beat))

    def _take_beat(self, beat: Beat) -> Heartbeat:
        now = trio.current_time()
        self._beat, self._beat_at = beat, now
        if beat.echo_s is not None:
            sample_s = max(0.0, now - beat.echo_s - beat.held_s)
            before_s = sample_s if self.rtt_s is None else self.rtt_s
            self.rtt_s = before_s + _RTT_WEIGHT * (sample_s - before_s)
            self.lanes["bulk"].rtt_s = self.rtt_s
        return _content(beat)

    # --- status ----------------------------------------------------------------------------

    @property
    def bandwidths(self) -> tuple[float | None, float | None]:
        """Bytes per second out, as measured here, and in, as the peer says."""
        told = self._beat.bytes_per_s if self._beat else None
        return self.lanes["bulk"].throughput.bytes_per_s, told

    def status(self) -> PeerStatus:
        """Describe the session now."""
        now = trio.current_time()
        return PeerStatus(
            peer=self.peer,
            address=_remote(self.lanes["control"]),
            is_dialler=self._is_dialler,
            connected_s=now - self._started_at,
            rtt_s=self.rtt_s,
            clock_offset_s=self._clock_offset_s,
            bytes_in=sum(lane.bytes_in for lane in self.lanes.values()),
            bytes_out=sum(lane.bytes_out for lane in self.lanes.values()),
            heartbeat=_content(self._beat) if self._beat else None,
            heartbeat_s_ago=now - self._beat_at if self._beat else None,
        )


def _content(beat: Beat) -> Heartbeat:
    return Heartbeat(beat.step, beat.last_finished_s_ago, beat.record_seen)


def _remote(lane: Lane) -> str:
    addresses = lane.stream.conn.get_transport_addresses()
    return str(addresses[0]) if addresses else ""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The fault that a person should read: a violation says more than the lost connection."""
    faults: list[BaseException] = []
    for fault in group.exceptions:
        faults.append(_first(fault) if isinstance(fault, BaseExceptionGroup) else fault)
    return next((fault for fault in faults if isinstance(fault, PeerError)), faults[0])
