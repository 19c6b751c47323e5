"""GWTF: the FlowNode state machines of ``protocol.routing``, exchanging messages in simulated time.

Control messages take the link's latency and come in order. Each node ticks at a phase of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.routing.flow_node import FlowEdge, FlowNode, Send
from protocol.routing.settings import RoutingSettings
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


class Gwtf(Policy):
    """A microbatch takes a unit of flow; without one it goes to the cheapest holder with room."""

    name = "gwtf"

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """Start the data nodes' routers; the holders' start when they join."""
        self.settings = RoutingSettings()
        self._nodes: dict[int, FlowNode] = {}
        self._known: dict[PeerId, int] = {}
        self._taken: dict[int, dict[int, tuple[int, FlowEdge]]] = {}
        self._busy: set[tuple[int, int]] = set()
        super().attach(world, stages)
        for data_node in world.fleet.network.data_nodes:
            self._enter(data_node, 0)
        return stages

    def prepare_s(self) -> float:
        """Let the routes form before the first step."""
        return _PREPARE_TICKS * self.settings.tick_s

    # --- control plane -----------------------------------------------------------------------

    def joined(self, node: int) -> None:
        """Start its router; everybody learns of it a moment later."""
        self._enter(node, self.world.stage_of(node))

    def lost(self, node: int) -> None:
        """Everybody that lives forgets it."""
        del self._known[peer_at(node)]
        for other in sorted(self._nodes):
            if self.world.is_alive(other):
                self._act(other, lambda flow, now: flow.lose(peer_at(node), now))

    def path_cost_s(self, node: int) -> float | None:
        """The mean cost of the flows from here on, as in its record."""
        edges = self._nodes[node].outflows if node in self._nodes else ()
        costs = [edge.link_cost_s + edge.cost_to_sink_s for edge in edges]
        return sum(costs) / len(costs) if costs else None

    def _enter(self, node: int, stage: int) -> None:
        world = self.world
        self._known[peer_at(node)] = stage
        demand = world.fleet.network.demands[world.fleet.site(node)] if stage == 0 else 0
        self._nodes[node] = FlowNode(
            peer_at(node),
            stage=stage,
            num_stages=world.num_stages,
            capacity=demand if stage == 0 else world.fleet.capacity(node),
            demand=demand,
            costs=_Costs(world.fleet, node),
            rng=Random(world.rng.getrandbits(64)),  # noqa: S311 (a simulation)
            settings=self.settings,
        )
        for other in sorted(self._nodes):
            delay_s = world.fleet.latency_s(node, other) if other != node else 0.0
            world.agenda.after(delay_s, lambda o=other: self._learn(o))  # type: ignore[misc]
        world.agenda.after(world.rng.random() * self.settings.tick_s, lambda: self._tick(node))

    def _learn(self, node: int) -> None:
        known = {p: s for p, s in self._known.items() if _node_at(p) != node}
        self._act(node, lambda flow, now: flow.set_peers(known, now))

    def _tick(self, node: int) -> None:
        if not self.world.is_alive(node):
            del self._nodes[node]
            return
        self._act(node, lambda flow, now: flow.tick(now))
        self.world.agenda.after(self.settings.tick_s, lambda: self._tick(node))
        if self.world.stage_of(node) == 0:
            self.world.issue()

    def _act(self, node: int, action: Callable[[FlowNode, float], list[Send]]) -> None:
        world = self.world
        if node not in self._nodes or not world.is_alive(node):
            return
        for send in action(self._nodes[node], world.agenda.now):
            world.count_message()
            target = _node_at(send.peer)
            delay_s = world.fleet.latency_s(node, target)
            world.agenda.after(delay_s, lambda t=target, m=send.message: self._arrive(node, t, m))  # type: ignore[misc]

    def _arrive(self, sender: int, node: int, message: Message) -> None:
        self._act(node, lambda flow, now: flow.handle(peer_at(sender), message, now))

    # --- data plane --------------------------------------------------------------------------

    def may_start(self, data_node: int) -> bool:
        """While a unit of flow is free; beside the flows only while they are too few."""
        if not super().may_start(data_node):
            return False
        return self._free(data_node, data_node) is not None or self._is_forming(data_node)

    def _is_forming(self, data_node: int) -> bool:
        world = self.world
        demand = world.fleet.network.demands[data_node]
        return len(self._nodes[data_node].outflows) < demand and any(
            world.room(n) > 0 for n in world.holders(1)
        )

    def _free(self, node: int, data_node: int) -> FlowEdge | None:
        """Return the cheapest unit from ``node`` to ``data_node`` that no microbatch uses."""
        free = [
            edge
            for edge in self._nodes[node].outflows
            if edge.target == peer_at(data_node)
            and (node, edge.edge_id) not in self._busy
            and peer_at(_node_at(edge.peer)) in self._known
        ]
        return min(free, key=lambda e: (e.link_cost_s + e.cost_to_sink_s, e.edge_id), default=None)

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """Along the pair of its unit, else any free unit, else beside the flows."""
        before = microbatch.holder(stage - 1)
        edge = self._onward(microbatch, stage, before)
        if edge is None:
            return self._beside(before, stage, microbatch.path[stage])
        self._take(microbatch, stage, before, edge)
        return _node_at(edge.peer)

    def _onward(self, microbatch: Microbatch, stage: int, before: int) -> FlowEdge | None:
        self._give_back(microbatch, stage)
        taken = self._taken.get(microbatch.number, {}).get(stage - 1)
        if before not in self._nodes:
            return None
        if taken is not None:
            origin, inward = taken
            for a, b in self._nodes[before].pairs():
                if (a.peer, a.edge_id) == (peer_at(origin), inward.edge_id) and self._is_usable(
                    before, b
                ):
                    return b
        return self._free(before, microbatch.data_node)

    def _is_usable(self, node: int, edge: FlowEdge) -> bool:
        return (node, edge.edge_id) not in self._busy and edge.peer in self._known

    def _take(self, microbatch: Microbatch, stage: int, node: int, edge: FlowEdge) -> None:
        self._busy.add((node, edge.edge_id))
        self._taken.setdefault(microbatch.number, {})[stage] = node, edge

    def _give_back(self, microbatch: Microbatch, stage: int) -> None:
        taken = self._taken.get(microbatch.number, {}).pop(stage, None)
        if taken is not None:
            self._busy.discard((taken[0], taken[1].edge_id))

    def _beside(self, before: int, stage: int, avoid: int | None) -> int:
        """The cheapest holder with room, else the one with the least to do."""
        world, fleet = self.world, self.world.fleet
        holders = [n for n in world.holders(stage) if n != avoid] or list(world.holders(stage))

        def worth(node: int) -> tuple[float, float, int]:
            lacking = max(0, 1 - world.room(node))
            return lacking * fleet.compute_s(node), fleet.cost_s(before, node), node

        return min(holders, key=worth)

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """A holder with an unpaired unit or room: it needs no way onward, only its stage."""
        self._give_back(microbatch, stage)
        return self.earliest(microbatch, stage)

    def ended(self, microbatch: Microbatch) -> None:
        """Its units are free again."""
        for node, edge in self._taken.pop(microbatch.number, {}).values():
            self._busy.discard((node, edge.edge_id))
