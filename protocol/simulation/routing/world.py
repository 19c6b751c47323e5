"""The world of a routing simulation: FlowNodes, and messages that take time and get lost.

An event heap on a virtual clock. Each node ticks at a phase of its own. A message takes the link's
latency and some jitter; messages from one node to another stay in order, as on one connection; some
never arrive. A crash is told to nobody: each survivor notices it for itself, up to ``detect_s``
later. The same seed gives the same trace.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.routing.flow_node import FlowNode, Send
from protocol.routing.settings import RoutingSettings
from protocol.simulation.routing.network import RoutingNetwork, peer_at

Clock = Callable[[], float]


@dataclass(frozen=True)
class WorldOptions:
    """How the world treats messages and news.

    ``loss``: part of the messages that never arrive; ``jitter``: what a message may take longer, as
    a part of the latency; ``detect_s``: the longest until a crash or a newcomer is noticed.
    """

    loss: float = 0.01
    jitter: float = 0.1
    detect_s: float = 4.0
    settings: RoutingSettings = field(default_factory=RoutingSettings)


class LinkCosts:
    """What a node has measured of its own speed and its links: exactly what the network says."""

    def __init__(self, network: RoutingNetwork, index: int) -> None:
        self._compute_s = network.compute_s[index]
        self._link_s: list[float] = network.link_s[index].tolist()

    def compute_s(self) -> float:
        """Seconds per microbatch on this node."""
        return self._compute_s

    def link_s(self, peer: PeerId) -> float:
        """Latency and transfer to a peer, in s."""
        return self._link_s[INDEX[peer]]


class _Indices(dict[PeerId, int]):
    """The index in each peer's name; read once."""

    def __missing__(self, peer: PeerId) -> int:
        index = self[peer] = int(peer[8:])
        return index


INDEX = _Indices()


@dataclass(slots=True)
class Resident:
    """A node and its life: a computer that comes back is another resident."""

    index: int
    node: FlowNode
    is_alive: bool = True


class RoutingWorld:
    """All nodes of a network, each with its FlowNode."""

    def __init__(
        self, network: RoutingNetwork, seed: int, options: WorldOptions, clock: Clock | None = None
    ) -> None:
        self.network, self.options = network, options
        self.now = 0.0
        self.num_sent = self.num_lost = self.num_ticks = 0
        self.cpu_s = 0.0
        self.residents: dict[int, Resident] = {}
        self._rng = Random(seed)  # noqa: S311 - a simulation
        self._clock = clock
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._num_events = 0
        self._arrivals: dict[tuple[int, int], float] = {}
        self._digest = blake2b(digest_size=16)
        self._latency_s: list[list[float]] = network.latency_s.tolist()
        self.sent_by = [0] * network.num_nodes  # messages, by index
        self._names = [peer_at(i) for i in range(network.num_nodes)]
        self._enter(range(network.num_nodes))

    # --- time ------------------------------------------------------------------------------

    @property
    def tick_s(self) -> float:
        """How long a round is, in which each node acts once."""
        return self.options.settings.tick_s

    def run_until(self, time_s: float) -> None:
        """Let everything happen that is due before ``time_s``."""
        while self._events and self._events[0][0] < time_s:
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        self.now = time_s

    def _at(self, time_s: float, action: Callable[..., None], *arguments: object) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action, arguments))

    @property
    def digest(self) -> str:
        """The hash of all messages that arrived, and when: equal for equal seeds."""
        return self._digest.hexdigest()

    # --- who is there ----------------------------------------------------------------------

    @property
    def alive(self) -> list[int]:
        """The indices of the nodes that are there."""
        return sorted(self.residents)

    def crash(self, indices: Collection[int]) -> None:
        """End nodes without a word; the survivors notice, each in its own time."""
        gone = [self.residents.pop(i) for i in sorted(indices)]
        for resident in gone:
            resident.is_alive = False
        for resident in self._present():
            for lost in gone:
                self._at(self._notice_s(), self._lose, resident, peer_at(lost.index))

    def join(self, indices: Collection[int]) -> None:
        """Start nodes; the others learn of them, each in its own time."""
        others = self._present()
        self._enter(sorted(indices))
        known = self._directory()
        for resident in others:
            self._at(self._notice_s(), self._learn, resident, known)

    def drain(self, index: int) -> None:
        """Tell a node that it will leave; ``crash`` it when its flows are gone."""
        resident = self.residents[index]
        self._act(resident, resident.node.drain)

    def _notice_s(self) -> float:
        return self.now + self.options.detect_s * (1 + self._rng.random()) / 2

    def _present(self) -> list[Resident]:
        return [self.residents[i] for i in self.alive]

    def _directory(self) -> Mapping[PeerId, int]:
        return {peer_at(i): self.network.stages[i] for i in self.alive}

    def _enter(self, indices: Iterable[int]) -> None:
        network, entered = self.network, []
        for i in indices:
            node = FlowNode(
                peer_at(i),
                stage=network.stages[i],
                num_stages=network.num_stages,
                capacity=network.demands[i] if network.stages[i] == 0 else network.capacities[i],
                demand=network.demands[i],
                costs=LinkCosts(network, i),
                rng=Random(self._rng.getrandbits(64)),  # noqa: S311
                settings=self.options.settings,
            )
            self.residents[i] = Resident(i, node)
            entered.append(self.residents[i])
        known = self._directory()
        for resident in entered:
            self._learn(resident, known)
            # Everybody's first tick is at another time, so that nobody acts in step.
            self._at(self.now + self._rng.random() * self.tick_s, self._tick, resident)

    # --- what happens ----------------------------------------------------------------------

    def _learn(self, resident: Resident, known: Mapping[PeerId, int]) -> None:
        others = {p: s for p, s in known.items() if INDEX[p] != resident.index}
        self._act(resident, resident.node.set_peers, others)

    def _lose(self, resident: Resident, peer: PeerId) -> None:
        if INDEX[peer] not in self.residents:  # it may be back already
            self._act(resident, resident.node.lose, peer)

    def _tick(self, resident: Resident) -> None:
        if resident.is_alive:
            self.num_ticks += 1
            self._act(resident, resident.node.tick)
            self._at(self.now + self.tick_s, self._tick, resident)

    def _arrive(self, sender: int, receiver: Resident, message: Message) -> None:
        if receiver.is_alive:
            entry = f"{self.now:.9f} {sender} {receiver.index} {message.kind}\n"
            self._digest.update(entry.encode())
            name = self._names[sender]
            self._act(receiver, receiver.node.handle, name, message)

    def _act(
        self, resident: Resident, action: Callable[..., list[Send]], *arguments: object
    ) -> None:
        """Let a node act, and carry what it sends."""
        if not resident.is_alive:
            return
        if self._clock is None:
            sends = action(*arguments, self.now)
        else:
            began_s = self._clock()
            sends = action(*arguments, self.now)
            self.cpu_s += self._clock() - began_s
        for send in sends:
            self._carry(resident.index, INDEX[send.peer], send.message)

    def _carry(self, sender: int, receiver: int, message: Message) -> None:
        self.num_sent += 1
        self.sent_by[sender] += 1
        if self._rng.random() < self.options.loss:
            self.num_lost += 1
            return
        delay_s = self._latency_s[sender][receiver] * (1 + self.options.jitter * self._rng.random())
        pair = sender, receiver
        arrival_s = max(self.now + delay_s, self._arrivals.get(pair, 0.0))
        self._arrivals[pair] = arrival_s
        present = self.residents.get(receiver)
        if present is not None:
            self._at(arrival_s, self._arrive, sender, present, message)
