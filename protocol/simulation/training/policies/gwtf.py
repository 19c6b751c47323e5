"""GWTF: the FlowRouter of the daemon, one per node, exchanging messages in simulated time.

Control messages take the link's latency and come in order. Each node ticks at a phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from protocol.keys import PeerId
from protocol.messages import Decision, Message
from protocol.routing import FlowRouter, RoutingSettings, Send
from protocol.simulation.routing.network import peer_at
from protocol.simulation.training.fleet import Fleet
from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.policies.base import Policy, World

_PREPARE_TICKS = 60


def _node_at(peer: PeerId) -> int:
    """Return the node that a peer's name tells."""
    return int(peer[8:])


class _Costs:
    """What a node has measured: exactly what the network says."""

    def __init__(self, fleet: Fleet, node: int) -> None:
        self._fleet, self._node = fleet, node

    def compute_s(self) -> float:
        """Mean of forward and backward."""
        return self._fleet.compute_s(self._node)

    def link_s(self, peer: PeerId) -> float:
        """Latency and transfer, mean of both directions."""
        return self._fleet.link_s(self._node, _node_at(peer))

    def rtt_s(self, peer: PeerId) -> float:
        """Latency there and back."""
        other = _node_at(peer)
        return self._fleet.latency_s(self._node, other) + self._fleet.latency_s(other, self._node)


class _Counted(NamedTuple):
    """A hop that the router of ``source`` counts until its gradient is back."""

    source: int
    target: PeerId
    offered_s: float


class Gwtf(Policy):
    """Every node asks its own router; what has no room is told so, and the sender keeps it."""

    name = "gwtf"
    refuses = True

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """Start the data nodes' routers; the holders' start when they join."""
        self.settings = RoutingSettings()
        self._routers: dict[int, FlowRouter] = {}
        self._counted: dict[tuple[int, int], _Counted] = {}
        self._step = self._term = 0
        super().attach(world, stages)
        for data_node in world.fleet.network.data_nodes:
            self._enter(data_node, 0)
        return stages

    def prepare_s(self) -> float:
        """Let the routes form before the first step."""
        self._decide()
        return _PREPARE_TICKS * self.settings.tick_s

    # --- control plane -----------------------------------------------------------------------

    def joined(self, node: int) -> None:
        """Start its router; the decision that opens the step names it."""
        self._enter(node, self.world.stage_of(node))

    def opens(self) -> None:
        """Everybody hears of the step and of who belongs to it."""
        self._step += 1
        self._decide()

    def lost(self, node: int) -> None:
        """Sessions to it end, and the step goes on under another term without it."""
        for other in sorted(self._routers):
            self._act(other, lambda r, now: r.on_session(peer_at(node), is_up=False, now=now))
        self._decide()

    def _decide(self) -> None:
        self._term += 1
        world, network = self.world, self.world.fleet.network
        members = [network.data_nodes, *map(world.holders, range(1, world.num_stages + 1))]
        self._decision = decision = Decision.model_construct(
            swarm="", step=self._step, term=self._term, ballot=0, shares=(), digests=(),
            roster=tuple(tuple(sorted(map(peer_at, nodes))) for nodes in members),
        )  # fmt: skip
        leader = network.data_nodes[0]
        for other in sorted(self._routers):
            delay_s = world.fleet.latency_s(leader, other) if other != leader else 0.0
            self._later(delay_s, other, lambda r, now: r.on_decision(decision, now))

    def _enter(self, node: int, stage: int) -> None:
        world = self.world
        costs = _Costs(world.fleet, node)
        self._routers[node] = FlowRouter(
            peer_at(node),
            costs=costs,
            rtt_s=costs.rtt_s,
            rng=Random(world.rng.getrandbits(64)),  # noqa: S311 (a simulation)
            settings=self.settings,
            room_of=lambda peer: world.fleet.capacity(_node_at(peer)),
        )
        room = 1 + world.fleet.capacity(node)  # a holder keeps a slot for repairs beside its flows
        self._act(node, lambda r, now: r.serve(stage, world.num_stages, room, now))
        world.agenda.after(world.rng.random() * self.settings.tick_s, lambda: self._tick(node))

    def _tick(self, node: int) -> None:
        if not self.world.is_alive(node):
            del self._routers[node]
            return
        self._act(node, lambda r, now: r.tick(now))
        self.world.agenda.after(self.settings.tick_s, lambda: self._tick(node))
        if self.world.stage_of(node) == 0:
            self.world.issue()

    def _later(
        self, delay_s: float, node: int, act: Callable[[FlowRouter, float], list[Send]]
    ) -> None:
        self.world.agenda.after(delay_s, lambda: self._act(node, act))

    def _act(self, node: int, act: Callable[[FlowRouter, float], list[Send]]) -> None:
        world = self.world
        if node not in self._routers or not world.is_alive(node):
            return
        for send in act(self._routers[node], world.agenda.now):
            world.count_message()
            self._deliver(node, _node_at(send.peer), send.message)

    def _deliver(self, source: int, target: int, message: Message) -> None:
        delay_s = self.world.fleet.latency_s(source, target)
        self._later(delay_s, target, lambda r, now: r.handle(peer_at(source), message, now))

    def path_cost_s(self, node: int) -> float | None:
        """The mean cost of the flows from here on, as its record tells it."""
        return self._routers[node].report.cost_s if node in self._routers else None

    # --- data plane --------------------------------------------------------------------------

    def may_start(self, data_node: int) -> bool:
        """As many as the router's window allows."""
        window = self._routers[data_node].window(self._decision, self.world.agenda.now)
        return self.world.in_flight(data_node) < window

    def next_hop(self, microbatch: Microbatch, stage: int) -> int | None:
        """Whom the router of the hop before names, or None: wait a moment."""
        gone = microbatch.path[stage]
        self._uncount(microbatch, stage, is_fault=gone is not None)
        before, now = microbatch.holder(stage - 1), self.world.agenda.now
        if before not in self._routers:
            return self.earliest(microbatch, stage)
        data_node = peer_at(microbatch.data_node)
        avoid = {peer_at(n) for n in (*microbatch.refused, gone) if n is not None}
        previous = peer_at(microbatch.holder(stage - 2)) if stage > 1 else None
        router = self._routers[before]
        peer = router.choose(stage, avoid, now, data_node=data_node, previous=previous)
        if peer is None:
            return None
        router.sent(peer, now, data_node=data_node)
        self._counted[microbatch.number, stage] = _Counted(before, peer, now)
        return _node_at(peer)

    def refused(self, microbatch: Microbatch, stage: int) -> None:
        """Who has no room is not to blame."""
        self._uncount(microbatch, stage, is_fault=False)

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """Whoever is done first; it needs no way onward, only its stage."""
        self._uncount(microbatch, stage, is_fault=True)
        return self.earliest(microbatch, stage)

    def returned(self, microbatch: Microbatch, stage: int) -> None:
        """The gradient of ``stage`` is back at the hop before."""
        counted = self._counted.pop((microbatch.number, stage), None)
        if counted is not None and counted.source in self._routers:
            now = self.world.agenda.now
            self._routers[counted.source].returned(
                counted.target, now - counted.offered_s, now,
                data_node=peer_at(microbatch.data_node),
            )  # fmt: skip

    def ended(self, microbatch: Microbatch) -> None:
        """Nothing comes back any more."""
        for stage in range(1, self.world.num_stages + 1):
            self._uncount(microbatch, stage, is_fault=False)

    def _uncount(self, microbatch: Microbatch, stage: int, *, is_fault: bool) -> None:
        counted = self._counted.pop((microbatch.number, stage), None)
        if counted is not None and counted.source in self._routers:
            self._routers[counted.source].lost(
                counted.target, self.world.agenda.now,
                data_node=peer_at(microbatch.data_node), is_fault=is_fault,
            )  # fmt: skip
