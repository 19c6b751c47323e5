"""What is true of a world, seen from above: whole flows, and broken invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from protocol.routing.flow_node import FlowEdge
from protocol.simulation.routing.network import peer_at
from protocol.simulation.routing.routes import Route, cost_s
from protocol.simulation.routing.world import INDEX, RoutingWorld

_TOLERANCE_S = 1e-6


def whole_routes(world: RoutingWorld) -> list[Route]:
    """Return the flows that lead from a data node over every stage back to it, as tables say.

    Both ends of each link have to know of it, under the same number and for the same data node.
    """
    onward = Onward(world)
    found = []
    for source in world.network.data_nodes:
        if source in world.residents:
            for edge in world.residents[source].node.outflows:
                holders = onward.follow(source, edge)
                if holders is not None:
                    found.append(Route(source, holders))
    return found


class Onward:
    """Where each flow goes on, node by node; each node is asked once."""

    def __init__(self, world: RoutingWorld) -> None:
        self._world = world
        self._tables: dict[int, dict[tuple[int, int], FlowEdge]] = {}

    def table(self, index: int) -> dict[tuple[int, int], FlowEdge]:
        """Return (who it comes from, number) -> where it goes."""
        if index not in self._tables:
            pairs = self._world.residents[index].node.pairs()
            self._tables[index] = {(INDEX[a.peer], a.edge_id): b for a, b in pairs}
        return self._tables[index]

    def follow(self, source: int, edge: FlowEdge) -> tuple[int, ...] | None:
        """Return the holders behind a data node's outflow, None if it ends on the way."""
        target, at = peer_at(source), source
        holders: list[int] = []
        while edge.target == target:
            beyond = INDEX[edge.peer]
            if beyond not in self._world.residents:
                return None
            if beyond == source:
                ends = {
                    (INDEX[e.peer], e.edge_id) for e in self._world.residents[source].node.inflows
                }
                return tuple(holders) if (at, edge.edge_id) in ends else None
            following = self.table(beyond).get((at, edge.edge_id))
            if following is None:
                return None
            holders.append(beyond)
            at, edge = beyond, following
        return None


def overfull(world: RoutingWorld) -> list[str]:
    """Invariant 1: nobody ever carries more than it can."""
    found = []
    for i, resident in sorted(world.residents.items()):
        stage, node = world.network.stages[i], resident.node
        room = world.network.demands[i] if stage == 0 else world.network.capacities[i]
        used = len(node.outflows) if stage == 0 else max(len(node.inflows), len(node.outflows))
        if used > room:
            found.append(f"{world.network.names[i]} carries {used} flows and can carry {room}")
    return found


def unmatched(world: RoutingWorld) -> list[str]:
    """Invariant 2: after quiet, both ends of a link know of each unit of flow across it."""
    ends: Counter[tuple[int, int, int, str]] = Counter()
    for i, resident in world.residents.items():
        ends.update((i, INDEX[e.peer], e.edge_id, e.target) for e in resident.node.outflows)
        ends.subtract((INDEX[e.peer], i, e.edge_id, e.target) for e in resident.node.inflows)
    names = world.network.names
    return [
        f"only the {'start' if n > 0 else 'end'} of {names[a]} -> {names[b]} knows flow {number}"
        for (a, b, number, _), n in sorted(ends.items())
        if n
    ]


def not_telescoping(world: RoutingWorld) -> list[str]:
    """Invariant 5: after quiet, each cost to the sink is the sum of the links' costs behind it."""
    onward, found = Onward(world), []
    for route in whole_routes(world):
        for at, edge, true_s in _costs_along(world, onward, route):
            if abs(edge.cost_to_sink_s - true_s) > _TOLERANCE_S:
                name, believed_s = world.network.names[at], edge.cost_to_sink_s
                found.append(f"{name} believes in {believed_s:.6f} s, it is {true_s:.6f} s")
    return found


def _costs_along(
    world: RoutingWorld, onward: Onward, route: Route
) -> Iterator[tuple[int, FlowEdge, float]]:
    """Yield each node of a route, its outflow, and the cost to the sink that this ought to have."""
    source = route.data_node
    left_s = cost_s(world.network, route)
    edges = world.residents[source].node.outflows
    edge = next(e for e in edges if onward.follow(source, e) == route.holders)
    for at, beyond in route.hops:
        left_s -= float(world.network.cost_s[at, beyond])
        yield at, edge, left_s
        if beyond != source:
            edge = onward.table(beyond)[at, edge.edge_id]
