"""One simulated node's Network port: the same contract that the libp2p transport keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import trio

from protocol.errors import PeerError, PeerGone, PeerTimeout
from protocol.keys import PeerId
from protocol.messages import Message
from protocol.ports import Envelope, PeerChange, Tensor
from protocol.simulation.host import VirtualHost
from protocol.simulation.session import Frame, Session
from protocol.simulation.timeline import Outcome

if TYPE_CHECKING:
    from protocol.simulation.network import VirtualNetwork

_EVENTS_CAPACITY = 64


def address_of(peer: PeerId) -> str:
    """Return where a simulated node listens, in the form that records carry."""
    return f"/memory/{peer}"


class SimulatedNetwork:
    """A node's sessions. ``run`` feeds ``events`` and must run as long as the node does."""

    def __init__(self, host: VirtualHost, world: VirtualNetwork) -> None:
        self.host, self.peer_id = host, host.peer
        self._world = world
        self._sessions: dict[PeerId, Session] = {}
        self._known: set[PeerId] = set()
        self._send_event, self.events = trio.open_memory_channel[Envelope | PeerChange](
            _EVENTS_CAPACITY
        )
        self._backlog: deque[tuple[Envelope | PeerChange, Callable[[], None]]] = deque()
        self._filled = trio.Event()
        self._is_over = False

    # --- the port --------------------------------------------------------------------------

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Deliver a message: one round trip, after a dial if need be; see ``ports.Network``."""
        if peer == self.peer_id:
            raise ValueError(f"a node does not send {message.kind} to itself")
        frame = self._world.codec.frame(message, tensors)
        try:
            with trio.fail_after(self._world.deadlines.delivery_s):
                await self._deliver(peer, frame)
        except trio.TooSlowError:
            await self.host.awake()
            raise PeerTimeout(f"{message.kind} was not acknowledged in time") from None
        await self.host.awake()

    async def _deliver(self, peer: PeerId, frame: Frame) -> None:
        await self.host.awake()
        if not self.host.is_alive:
            raise PeerGone("this node is dead")
        session = self._sessions.get(peer)
        if session is None:
            if peer not in self._known:
                raise PeerGone("no address of this peer is known")
            session = await self._world.dial(self, peer).wait()
            if self._sessions.get(peer) is not session:
                raise PeerGone("the session ended as soon as it was made")
        await self._world.transmit(self, session, frame).wait()

    def introduce(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Learn where a peer listens."""
        if address_of(peer) in addresses:
            self._known.add(peer)

    def expect(self, peers: Collection[PeerId]) -> None:
        """There is room for everybody here."""

    def connected(self) -> Collection[PeerId]:
        """The peers whose session is up, oldest first."""
        return list(self._sessions)

    def rtt_s(self, peer: PeerId) -> float | None:
        """The round trip to a connected peer."""
        if peer not in self._sessions:
            return None
        return self._world.rtt_s(self.host, self._world.host_of(peer))

    def bandwidths(self, peer: PeerId) -> tuple[float | None, float | None]:
        """What the links to and from a connected peer carry."""
        if peer not in self._sessions:
            return None, None
        other = self._world.host_of(peer)
        return (
            self._world.bandwidth_bytes_s(self.host, other),
            self._world.bandwidth_bytes_s(other, self.host),
        )

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the session with a peer; both sides get a PeerChange."""
        session = self._sessions.get(peer)
        if session is not None and self.host.is_alive:
            self.close(session, reason, PeerGone)
            self._world.hang_up(self, session, "the other side ended it")

    # --- what the world does to it ---------------------------------------------------------

    def session_with(self, peer: PeerId) -> Session | None:
        """Return the session that this side believes to be up."""
        return self._sessions.get(peer)

    def sessions(self) -> list[Session]:
        """Return all sessions of this side."""
        return list(self._sessions.values())

    def open(self, session: Session) -> None:
        """Take a new session; an old one with the same peer, whose end was not seen yet, ends."""
        peer = session.other(self.peer_id)
        old = self._sessions.get(peer)
        if old is not None:
            self.close(old, "a new connection replaced it", PeerGone)
        self._sessions[peer] = session
        self._world.trace.add(self.host.name, "connected", self._world.host_of(peer).name)
        self._put(PeerChange(peer, True))

    def close(self, session: Session, reason: str, error: type[PeerError]) -> None:
        """Believe a session ended: what was not acknowledged fails, and the node is told."""
        peer = session.other(self.peer_id)
        if self._sessions.get(peer) is not session:
            return
        del self._sessions[peer]
        for outcome in session.awaited[self.peer_id]:
            outcome.fail(error(f"the session ended: {reason}"))
        self._world.trace.add(self.host.name, "disconnected", self._world.host_of(peer).name)
        self._put(PeerChange(peer, False, reason))

    def take(self, session: Session, frame: Frame, acknowledge: Callable[[], None]) -> None:
        """Receive a frame, unless this side has left the session."""
        sender = session.other(self.peer_id)
        if self._sessions.get(sender) is session:
            self._world.note_received(sender, self.host, frame)
            self._put(Envelope(sender, frame.message, frame.tensors), acknowledge)

    def delivered(self, session: Session, outcome: Outcome[None]) -> None:
        """Receive an acknowledgement."""
        session.awaited[self.peer_id].pop(outcome, None)
        outcome.succeed(None)

    # --- events ----------------------------------------------------------------------------

    def _put(self, item: Envelope | PeerChange, taken: Callable[[], None] = lambda: None) -> None:
        """Queue an item for the node and acknowledge it when the bounded channel takes it."""
        if self._is_over:  # the node only writes to its disk any more
            return
        if not self._backlog:
            try:
                self._send_event.send_nowait(item)
            except trio.WouldBlock:
                pass
            else:
                taken()
                return
        self._backlog.append((item, taken))
        self._filled.set()

    async def run(self) -> None:
        """Move what the bounded channel could not take at once, in order, until cancelled."""
        try:
            with self._send_event, self.events:
                while True:
                    await self._filled.wait()
                    while self._backlog:
                        item, taken = self._backlog[0]
                        await self._send_event.send(item)
                        await self.host.awake()
                        self._backlog.popleft()
                        taken()
                    self._filled = trio.Event()
        finally:
            self._is_over = True
