"""The virtual network: sessions between simulated nodes over links with latency and faults.

A frame occupies its sender's uplink, the link and its receiver's downlink, each first come first
served per lane (control does not wait behind bulk, as over two TCP connections). A cut direction
holds what was sent into it until it is mended or the silence is noticed; a frozen node's kernel
still takes frames in, and nobody acknowledges them. Deviations from TCP: no slow start, and a
message is lost or not as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from random import Random

import trio

from protocol.deadlines import Deadlines
from protocol.errors import PeerError, PeerGone, PeerTimeout
from protocol.keys import PeerId
from protocol.messages import Lane, Message
from protocol.simulation.adapter import SimulatedNetwork
from protocol.simulation.host import VirtualHost
from protocol.simulation.places import Link, LinkProfile
from protocol.simulation.session import Codec, Frame, Session, SizeOf, tensor_bytes
from protocol.simulation.timeline import Outcome, Timeline
from protocol.simulation.trace import Trace

_HANDSHAKE_ROUND_TRIPS = 3  # TCP, then Noise and Yamux
Tap = Callable[[VirtualHost, VirtualHost, Message], None]  # sender, receiver, what it received
_MIN_RETRANSMISSION_S = 0.2  # Linux's least RTO


class VirtualNetwork:
    """The world between the nodes."""

    def __init__(
        self,
        timeline: Timeline,
        trace: Trace,
        *,
        rng: Random,
        profile: LinkProfile,
        deadlines: Deadlines,
        size_of: SizeOf = tensor_bytes,
    ) -> None:
        self.timeline, self.deadlines, self.trace = timeline, deadlines, trace
        self.codec = Codec(size_of)
        self.taps: list[Tap] = []
        self._rng, self._profile = rng, profile
        self._nodes: dict[PeerId, SimulatedNetwork] = {}
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._cuts: dict[tuple[PeerId, PeerId], float] = {}
        self._dials: dict[tuple[PeerId, ...], Outcome[Session]] = {}
        self._busy_until: dict[tuple[str, PeerId, PeerId, Lane], float] = {}

    # --- the shape of the world ------------------------------------------------------------

    def attach(self, host: VirtualHost) -> SimulatedNetwork:
        """Return the network adapter of a new computer, which may take a dead one's place."""
        node = SimulatedNetwork(host, self)
        host.on_freeze = partial(self._freeze, node)
        host.on_death = partial(self._die, node)
        self._nodes[host.peer] = node
        return node

    def host_of(self, peer: PeerId) -> VirtualHost:
        """Return the newest computer with this key."""
        return self._nodes[peer].host

    def set_link(self, sender: PeerId, receiver: PeerId, link: Link) -> None:
        """Replace one direction between two nodes."""
        self._links[sender, receiver] = link

    def link(self, sender: VirtualHost, receiver: VirtualHost) -> Link:
        """Return what lies between two computers, in this direction."""
        own = self._links.get((sender.peer, receiver.peer))
        return own if own is not None else self._profile(sender.place, receiver.place)

    def latency_s(self, sender: VirtualHost, receiver: VirtualHost) -> float:
        """Return the one-way delay of a small frame, without jitter."""
        return self.link(sender, receiver).latency_s + sender.extra_delay_s

    def rtt_s(self, a: VirtualHost, b: VirtualHost) -> float:
        """Return the round trip of a small frame."""
        return self.latency_s(a, b) + self.latency_s(b, a)

    def bandwidth_bytes_s(self, sender: VirtualHost, receiver: VirtualHost) -> float:
        """Return what the narrowest place between two computers carries."""
        link = self.link(sender, receiver)
        return min(sender.place.up_bytes_s, link.bandwidth_bytes_s, receiver.place.down_bytes_s)

    # --- cuts ------------------------------------------------------------------------------

    def cut(self, sender: PeerId, receiver: PeerId) -> None:
        """Let nothing pass in this direction until it is mended."""
        self._cuts.setdefault((sender, receiver), trio.current_time())
        self._expect_silence(sender, receiver)

    def mend(self, sender: PeerId, receiver: PeerId) -> None:
        """Let frames pass again; those held arrive after a retransmission."""
        if self._cuts.pop((sender, receiver), None) is None:
            return
        node = self._nodes.get(sender)
        session = node.session_with(receiver) if node else None
        if session is not None:
            held, session.held[sender] = session.held[sender], []
            hosts = self._nodes[sender].host, self._nodes[receiver].host
            delay_s = self._retransmission_s(*hosts) + self.latency_s(*hosts)
            for action in held:
                self.timeline.after(delay_s, action)

    def partition(
        self,
        side: Iterable[PeerId],
        other: Iterable[PeerId],
        for_s: float,
        *,
        is_one_way: bool = False,
    ) -> None:
        """Cut two groups off from each other for a while; one way: nothing leaves ``side``."""
        pairs = [(a, b) for a in side for b in other]
        if not is_one_way:
            pairs += [(b, a) for a, b in pairs]
        for pair in pairs:
            self.cut(*pair)

        def mend_all() -> None:
            for pair in pairs:
                self.mend(*pair)

        self.timeline.after(for_s, mend_all)

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        """Whether either direction between two nodes is cut."""
        return (a, b) in self._cuts or (b, a) in self._cuts

    # --- sessions --------------------------------------------------------------------------

    def dial(self, origin: SimulatedNetwork, peer: PeerId) -> Outcome[Session]:
        """Start to connect, or join the attempt under way between the two."""
        pair = _pair(origin.peer_id, peer)
        if pair not in self._dials:
            outcome = self._dials[pair] = Outcome()
            target = self._nodes.get(peer)
            rtt_s = self.rtt_s(origin.host, target.host) if target else 0.0
            if target is not None and target.host.is_alive:
                delay_s = _HANDSHAKE_ROUND_TRIPS * rtt_s
                self.timeline.after(delay_s, partial(self._shake_hands, origin, peer, delay_s))
            else:
                self.timeline.after(rtt_s, partial(self._refuse, pair, "nobody listens there"))
            return outcome
        return self._dials[pair]

    def _shake_hands(self, origin: SimulatedNetwork, peer: PeerId, took_s: float) -> None:
        target, pair = self._nodes[peer], _pair(origin.peer_id, peer)
        if self.is_cut(*pair) or target.host.is_frozen or origin.host.is_frozen:
            rest_s = max(0.0, self.deadlines.dial_s - took_s)
            self.timeline.after(rest_s, partial(self._refuse, pair, "it did not answer"))
        elif not (target.host.is_alive and origin.host.is_alive):
            self._refuse(pair, "it is gone")
        else:
            session = Session((origin.peer_id, peer))
            for node in (origin, target):
                node.open(session)
            self._dials.pop(pair).succeed(session)

    def _refuse(self, pair: tuple[PeerId, ...], reason: str) -> None:
        self._dials.pop(pair).fail(PeerGone(f"could not connect: {reason}"))

    def hang_up(self, node: SimulatedNetwork, session: Session, reason: str) -> None:
        """Tell the other side that this one ended the session."""
        other = self._nodes[session.other(node.peer_id)]
        if (node.peer_id, other.peer_id) in self._cuts:
            delay_s = self.deadlines.session_silence_s
        else:
            delay_s = self.latency_s(node.host, other.host)
        self.timeline.after(delay_s, partial(self._close, other, session, reason, PeerGone))

    def _close(
        self, node: SimulatedNetwork, session: Session, reason: str, error: type[PeerError]
    ) -> None:
        node.host.when_awake(partial(node.close, session, reason, error))

    def _die(self, node: SimulatedNetwork) -> None:
        for session in node.sessions():
            self.hang_up(node, session, "the connection was reset")

    # --- silence ---------------------------------------------------------------------------

    def _freeze(self, node: SimulatedNetwork) -> None:
        for session in node.sessions():
            self._expect_silence(node.peer_id, session.other(node.peer_id))

    def _expect_silence(self, sender: PeerId, receiver: PeerId) -> None:
        node = self._nodes.get(sender)
        session = node.session_with(receiver) if node else None
        if session is not None:
            since = self._silent_since(sender, receiver)
            check = partial(self._notice_silence, session, sender, receiver, since)
            self.timeline.after(self.deadlines.session_silence_s, check)

    def _silent_since(self, sender: PeerId, receiver: PeerId) -> tuple[float | None, float | None]:
        return self._cuts.get((sender, receiver)), self._nodes[sender].host.frozen_since

    def _notice_silence(
        self,
        session: Session,
        sender: PeerId,
        receiver: PeerId,
        since: tuple[float | None, float | None],
    ) -> None:
        now = self._silent_since(sender, receiver)
        if any(then is not None and then == still for then, still in zip(since, now, strict=True)):
            for side in session.sides:
                self._close(self._nodes[side], session, "it fell silent", PeerTimeout)

    # --- frames ----------------------------------------------------------------------------

    def transmit(self, sender: SimulatedNetwork, session: Session, frame: Frame) -> Outcome[None]:
        """Send a frame; the outcome is settled by the acknowledgement or the session's end."""
        receiver = self._nodes[session.other(sender.peer_id)]
        outcome: Outcome[None] = Outcome()
        session.awaited[sender.peer_id][outcome] = None
        arrival_s = self._arrival_s(sender.host, receiver.host, frame)
        arrival_s = session.in_order(sender.peer_id, frame.lane, arrival_s)
        arrive = partial(self._arrive, receiver, session, frame)
        acknowledge = partial(self._acknowledge, sender, receiver, session, outcome)
        self._carry(session, sender.peer_id, arrival_s, partial(arrive, acknowledge))
        if sender.host.is_duplicating:
            again_s = arrival_s + self._rng.random() * self.rtt_s(sender.host, receiver.host)
            self._carry(session, sender.peer_id, again_s, partial(arrive, _do_nothing))
        return outcome

    def _arrival_s(self, sender: VirtualHost, receiver: VirtualHost, frame: Frame) -> float:
        link, now = self.link(sender, receiver), trio.current_time()
        ends, route = (sender.peer, receiver.peer), frame.size_bytes
        up = self._occupy(
            ("up", ends[0], ends[0], frame.lane), now, route / sender.place.up_bytes_s
        )
        across = self._occupy(("link", *ends, frame.lane), now, route / link.bandwidth_bytes_s)
        late_s = link.latency_s + sender.extra_delay_s + self._rng.random() * link.jitter_s
        while self._rng.random() < link.loss:
            late_s += self._retransmission_s(sender, receiver)
        # From now on and not from its arrival: who is late must not hold up what others send.
        down_s = route / receiver.place.down_bytes_s
        down = self._occupy(("down", ends[1], ends[1], frame.lane), now, down_s)
        return max(up, across, down) + late_s

    def _occupy(self, what: tuple[str, PeerId, PeerId, Lane], from_s: float, for_s: float) -> float:
        end_s = max(from_s, self._busy_until.get(what, 0.0)) + for_s
        self._busy_until[what] = end_s
        return end_s

    def _retransmission_s(self, sender: VirtualHost, receiver: VirtualHost) -> float:
        return max(_MIN_RETRANSMISSION_S, 2 * self.rtt_s(sender, receiver))

    def _carry(
        self, session: Session, sender: PeerId, at_s: float, action: Callable[[], None]
    ) -> None:
        direction = sender, session.other(sender)

        def arrive() -> None:
            if direction in self._cuts:
                session.held[sender].append(arrive)
            else:
                action()

        self.timeline.at(at_s, arrive)

    def _arrive(
        self,
        receiver: SimulatedNetwork,
        session: Session,
        frame: Frame,
        acknowledge: Callable[[], None],
    ) -> None:
        receiver.host.when_awake(partial(receiver.take, session, frame, acknowledge))

    def note_received(self, sender: PeerId, receiver: VirtualHost, frame: Frame) -> None:
        """Tell the trace and the taps about a frame that a node is about to see."""
        origin, message = self.host_of(sender), frame.message
        self.trace.add(receiver.name, "received", origin.name, message.kind, message.step)
        for tap in self.taps:
            tap(origin, receiver, message)

    def _acknowledge(
        self,
        sender: SimulatedNetwork,
        receiver: SimulatedNetwork,
        session: Session,
        outcome: Outcome[None],
    ) -> None:
        at_s = trio.current_time() + self.latency_s(receiver.host, sender.host)
        settle = partial(sender.host.when_awake, partial(sender.delivered, session, outcome))
        self._carry(session, receiver.peer_id, at_s, settle)


def _pair(a: PeerId, b: PeerId) -> tuple[PeerId, ...]:
    return (a, b) if a < b else (b, a)


def _do_nothing() -> None:
    """What a duplicate's acknowledgement changes."""
