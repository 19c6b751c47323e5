"""The Network port over libp2p: sessions by PeerID, made when they are needed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from node.transport.allowance import Allowances
from node.transport.control import CONTROL_CODES, Refusal
from node.transport.dialling import AddressBook, Dial, Dialler, Meeting
from node.transport.greeting import CLOCK_WARN_S, Greeter
from node.transport.host import HardenedHost
from node.transport.lane import Lane
from node.transport.reception import Reception
from node.transport.session import Heartbeat, PeerStatus, Session
from protocol.deadlines import Deadlines
from protocol.errors import PeerError, PeerGone, PeerTimeout
from protocol.keys import NodeKey, PeerId
from protocol.messages import Lane as LaneName
from protocol.messages import Message
from protocol.ports import Envelope, Observer, PeerChange, Tensor
from protocol.wire import MEBIBYTE, Codec, Frame, Limits

if TYPE_CHECKING:
    from trio_typing import TaskStatus

MAX_SESSIONS = 512
_CONTROL_CREDIT_BYTES = 8 * MEBIBYTE
_BULK_CREDIT_BYTES = 64 * MEBIBYTE
_WINDOW_BYTES = 16 * MEBIBYTE
_THREAD_BYTES = 4 * MEBIBYTE


def _ignore(peer: PeerId, heartbeat: Heartbeat) -> None:
    pass


class Libp2pNetwork:
    """Sessions with other nodes; ``running`` must be entered before anything is sent.

    Whoever reads ``events`` must not wait for ``send`` in the same task: a peer acknowledges
    when its reader takes the message, and two readers that send to each other would both wait.
    """

    def __init__(
        self,
        key: NodeKey,
        swarm: str,
        *,
        limits: Limits,
        observer: Observer,
        deadlines: Deadlines | None = None,
        heartbeat: Callable[[PeerId], Heartbeat] = lambda _: Heartbeat(step=0),
        on_heartbeat: Callable[[PeerId, Heartbeat], None] = _ignore,
        bulk_credit_bytes: int = _BULK_CREDIT_BYTES,
        wall_clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        announce_host: str | None = None,
    ) -> None:
        self.peer_id = key.peer_id
        self._deadlines = deadlines or Deadlines()
        self._observer = observer
        self._heartbeat, self._on_heartbeat = heartbeat, on_heartbeat
        self._credit: dict[LaneName, int] = {
            "control": _CONTROL_CREDIT_BYTES,
            "bulk": bulk_credit_bytes,
        }
        self._codec = Codec(limits, CONTROL_CODES)
        greeter = Greeter(swarm, self._codec, wall_clock)
        self._reception = Reception(greeter, self._judge, self._begin, self._deadlines, observer)
        self._host = HardenedHost(
            key, self._reception.serve, self._deadlines, observer, announce_host
        )
        self._book = AddressBook(self._deadlines.redial_backoff_s, rng or random.Random())  # noqa: S311
        self._dialler = Dialler(self._host, greeter, self._book, self._deadlines)
        self._allowances = Allowances()
        self._sessions: dict[PeerId, Session] = {}
        self._dials: dict[PeerId, Dial] = {}
        # no buffer: an event counts as taken when the core takes it
        self._events, self.events = trio.open_memory_channel[Envelope | PeerChange](0)
        # one job for each dial and each session: what bounds those bounds this
        self._jobs, self._job_queue = trio.open_memory_channel[Callable[[], Awaitable[None]]](
            math.inf
        )

    @asynccontextmanager
    async def running(self, listen: Sequence[str]) -> AsyncIterator[None]:
        """Listen on multiaddrs such as /ip4/0.0.0.0/tcp/4001; ResourceError if one is taken."""
        async with self._host.running(listen), trio.open_nursery() as nursery:
            nursery.start_soon(self._run_jobs)
            try:
                yield
            finally:
                nursery.cancel_scope.cancel()

    async def run(
        self,
        listen: Sequence[str],
        *,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The same, for ``nursery.start``."""
        async with self.running(listen):
            task_status.started()
            await trio.sleep_forever()

    async def _run_jobs(self) -> None:
        async with trio.open_nursery() as nursery:
            async for job in self._job_queue:
                nursery.start_soon(job)

    # --- the port --------------------------------------------------------------------------

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Deliver a message: dial if there is no session, return when the peer acknowledged it.

        Raises PeerGone (no address, dial failed, session ended) or PeerTimeout (``delivery_s``).
        """
        if peer == self.peer_id:
            raise ValueError("a node does not send to itself")
        frame = await self._encode(message, tensors)
        try:
            with trio.fail_after(self._deadlines.delivery_s):
                session = self._sessions.get(peer) or await self._connect(peer)
                await session.send(frame, message.lane)
        except trio.TooSlowError:
            raise PeerTimeout(f"{peer} did not acknowledge {message.kind} in time") from None

    def introduce(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Learn where a peer listens (from its signed record)."""
        self._book.learn(peer, addresses)

    def expect(self, peers: Collection[PeerId]) -> None:
        """These peers are let in even if strangers hold all sessions, and may send more."""
        self._allowances.expect(peers)
        self._book.pin(peers)

    def connected(self) -> Collection[PeerId]:
        """The peers whose session is up now."""
        return tuple(self._sessions)

    def rtt_s(self, peer: PeerId) -> float | None:
        """The smoothed round trip of heartbeats, or None if unknown."""
        session = self._sessions.get(peer)
        return session.rtt_s if session else None

    def bandwidths(self, peer: PeerId) -> tuple[float | None, float | None]:
        """Bytes per second that transfers to and from a peer reached, as far as that is known."""
        session = self._sessions.get(peer)
        return session.bandwidths if session else (None, None)

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the session with a peer that misbehaved or fell silent."""
        if session := self._sessions.get(peer):
            session.end(reason)

    # --- what status shows -----------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs with /p2p/ under which others can dial this node."""
        return self._host.addresses

    def peers(self) -> tuple[PeerStatus, ...]:
        """Describe every session that is up."""
        return tuple(session.status() for session in self._sessions.values())

    # --- sending ---------------------------------------------------------------------------

    async def _encode(self, message: Message, tensors: Sequence[Tensor]) -> Frame:
        if sum(tensor.nbytes for tensor in tensors) < _THREAD_BYTES:
            return self._codec.encode(message, tensors)
        return await trio.to_thread.run_sync(self._codec.encode, message, tensors)

    async def _connect(self, peer: PeerId) -> Session:
        """Return a session with the peer, from the dial in progress or a new one."""
        dial = self._dials.get(peer)
        if dial is None:
            if not self._book.of(peer):
                raise PeerGone(f"no address of {peer} is known")
            if self._book.pause_s(peer):
                raise PeerGone(f"{peer} could not be reached a moment ago")
            dial = self._dials[peer] = Dial(peer)
            self._jobs.send_nowait(partial(self._run_dial, dial))
        await dial.done.wait()
        session = self._sessions.get(peer)
        if session is None:
            raise PeerGone(dial.failure.cause if dial.failure else f"{peer} left at once")
        return session

    # --- sessions --------------------------------------------------------------------------

    async def _run_dial(self, dial: Dial) -> None:
        """Get a session by our dial, or by the peer's when that one wins."""
        failure = "no answer in time"
        try:
            with trio.move_on_after(self._deadlines.dial_s):
                with dial.scope:
                    # having accepted the peer's dial we must not greet it: it may yield to us
                    pending = self._reception.pending(dial.peer)
                    if pending is not None:
                        await pending.wait()
                    if not dial.established.is_set():
                        meeting = await self._dialler.dial(dial)
                        if meeting is not None:
                            self._begin(meeting)
                await dial.established.wait()
        except PeerError as error:
            failure = str(error)
        if not dial.established.is_set():
            self._book.failed(dial.peer)
            dial.failure = PeerGone(f"{dial.peer} cannot be reached: {failure}")
        del self._dials[dial.peer]
        dial.done.set()

    def _judge(self, peer: PeerId) -> Refusal | None:
        """Decide whether a peer that dials us may: one of two simultaneous dials must yield."""
        if not self._has_room_for(peer) or not self._allowances.of(peer).begin_session():
            return "full"
        dial = self._dials.get(peer)
        if dial is not None:
            is_ours_first = dial.has_greeted and not dial.scope.cancel_called
            if is_ours_first and self.peer_id < peer:
                return "dialling"
            dial.scope.cancel()
        return None

    def _has_room_for(self, peer: PeerId) -> bool:
        """Strangers get ``MAX_SESSIONS``, those in the making included; who is expected gets in."""
        known = {*self._sessions, *self._reception.peers}
        if peer in known or self._allowances.is_expected(peer):
            return True
        return sum(not self._allowances.is_expected(p) for p in known) < MAX_SESSIONS

    def _begin(self, meeting: Meeting) -> None:
        """Turn two greeted streams into the session with their peer; an older one ends."""
        lanes: dict[LaneName, Lane] = {}
        for name, stream in meeting.streams.items():
            stream.conn.adopted.set()
            stream.widen(_WINDOW_BYTES)
            lanes[name] = Lane(
                name, stream, self._codec, self._credit[name], self._observer,
                self._allowances.of(meeting.peer),
            )  # fmt: skip
        session = Session(
            meeting.peer,
            lanes,
            is_dialler=meeting.is_dialler,
            clock_offset_s=meeting.clock_offset_s,
            codec=self._codec,
            deadlines=self._deadlines,
            observer=self._observer,
        )
        if abs(meeting.clock_offset_s) > CLOCK_WARN_S:
            offset_s = round(meeting.clock_offset_s, 1)
            self._observer.event("clock_offset_seen", peer=meeting.peer, offset_s=offset_s)
        before = self._sessions.get(meeting.peer)
        if before is not None:
            before.end("replaced by a newer session")
        self._sessions[meeting.peer] = session
        if dial := self._dials.get(meeting.peer):
            dial.established.set()
        self._jobs.send_nowait(partial(self._run_session, session, before))

    async def _run_session(self, session: Session, before: Session | None) -> None:
        peer = session.peer
        is_announced = False

        async def announce() -> None:
            nonlocal is_announced
            if before is not None:
                await before.finished.wait()
            await self._events.send(PeerChange(peer, True))
            is_announced = True

        async def deliver(message: Message, tensors: tuple[Tensor, ...]) -> None:
            await self._events.send(Envelope(peer, message, tensors))

        await session.run(announce, deliver, self._heartbeat, self._on_heartbeat)
        if self._sessions.get(peer) is session:
            del self._sessions[peer]
        if is_announced:
            await self._events.send(PeerChange(peer, False, session.reason))
        session.finished.set()
