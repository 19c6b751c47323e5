"""How others would route, as fixed assignments with full information and no messages (spec 3).

All get the same network and capacities. What a policy does not look at, it does not look at here:
SWARM's scores hold no link, Petals' no bandwidth, DT-FM has one pipeline through each node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from random import Random

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from protocol.simulation.routing.network import Matrix, RoutingNetwork
from protocol.simulation.routing.routes import Route

_PETALS_HOP_S = 0.018  # its constant for each hop


@dataclass
class _Room:
    """Who is there, and what each can still carry."""

    network: RoutingNetwork
    alive: Collection[int]

    def __post_init__(self) -> None:
        present, network = set(self.alive), self.network
        self.left = [
            0 if i not in present else network.capacities[i] if stage else network.demands[i]
            for i, stage in enumerate(network.stages)
        ]
        self.stages = [
            [i for i in network.holders_of(s) if i in present]
            for s in range(1, network.num_stages + 1)
        ]

    def free(self, stage: int) -> list[int]:
        """Return the holders of a stage that can carry one more."""
        return [i for i in self.stages[stage - 1] if self.left[i] > 0]

    def next_source(self) -> int | None:
        """Return the data node that lacks most, or None if all are served."""
        sources = [i for i in self.network.data_nodes if self.left[i] > 0]
        return max(sources, key=lambda i: (self.left[i], -i), default=None)

    def take(self, route: Route) -> Route:
        """Fill the route's nodes by one."""
        for i in (route.data_node, *route.holders):
            self.left[i] -= 1
        return route


def _one_by_one(
    network: RoutingNetwork,
    alive: Collection[int],
    choose: Callable[[_Room, int], tuple[int, ...] | None],
) -> list[Route]:
    room = _Room(network, alive)
    routes = []
    while (source := room.next_source()) is not None:
        holders = choose(room, source)
        if holders is None:
            break
        routes.append(room.take(Route(source, holders)))
    return routes


def _cheapest(room: _Room, source: int, weight_s: Matrix) -> tuple[int, ...] | None:
    """Return the holders of the cheapest path through what is free, by stages backwards."""
    frees = [room.free(s) for s in range(1, room.network.num_stages + 1)]
    if not all(frees):
        return None
    best_s = weight_s[frees[-1], source]
    choices = []
    for near, far in zip(reversed(frees[:-1]), reversed(frees[1:]), strict=True):
        through_s = weight_s[np.ix_(near, far)] + best_s
        choices.append((far, through_s.argmin(axis=1)))
        best_s = through_s.min(axis=1)
    at = int((weight_s[source, frees[0]] + best_s).argmin())
    path = [frees[0][at]]
    for far, pick in reversed(choices):
        at = int(pick[at])
        path.append(far[at])
    return tuple(path)


def greedy(network: RoutingNetwork, alive: Collection[int], rng: Random) -> list[Route]:
    """The cheapest path that is left, again and again; nothing is ever moved."""
    return _one_by_one(network, alive, lambda room, at: _cheapest(room, at, network.cost_s))


def petals(network: RoutingNetwork, alive: Collection[int], rng: Random) -> list[Route]:
    """Its shortest path by round trips and throughput; who is full is left out."""
    latency_s = (network.latency_s + network.latency_s.T) / 2
    weight_s = latency_s + _PETALS_HOP_S + np.asarray(network.compute_s)[None, :]
    return _one_by_one(network, alive, lambda room, at: _cheapest(room, at, weight_s))


def random_routes(network: RoutingNetwork, alive: Collection[int], rng: Random) -> list[Route]:
    """Any free holder, in proportion to what it can still carry."""

    def choose(room: _Room, _source: int) -> tuple[int, ...] | None:
        path = []
        for stage in range(1, network.num_stages + 1):
            free = room.free(stage)
            if not free:
                return None
            path += rng.choices(free, [room.left[i] for i in free])
        return tuple(path)

    return _one_by_one(network, alive, choose)


def swarm(network: RoutingNetwork, alive: Collection[int], rng: Random) -> list[Route]:
    """SWARM: in each stage the holder that is done first; links are not looked at."""
    busy_s = [0.0] * network.num_nodes

    def choose(room: _Room, _source: int) -> tuple[int, ...] | None:
        path = []
        for stage in range(1, network.num_stages + 1):
            free = room.free(stage)
            if not free:
                return None
            pick = min(free, key=lambda i: (busy_s[i] + network.compute_s[i], ties[i]))
            busy_s[pick] += network.compute_s[pick] or 1.0
            path.append(pick)
        return tuple(path)

    ties = [rng.random() for _ in busy_s]
    return _one_by_one(network, alive, choose)


def dt_fm(network: RoutingNetwork, alive: Collection[int], rng: Random) -> list[Route]:
    """DT-FM: pipelines of one node per stage, matched so that the worst link is as short as can be.

    A pipeline carries what its weakest node can.
    """
    room = _Room(network, alive)
    pipelines: list[tuple[int, ...]] = [(i,) for i in room.stages[0]]
    for far in room.stages[1:]:
        near = [pipeline[-1] for pipeline in pipelines]
        match = _bottleneck_matching(network.cost_s[np.ix_(near, far)])
        pipelines = [(*pipelines[a], far[b]) for a, b in match]
    routes = []
    ranked = sorted(pipelines, key=lambda p: min(room.left[i] for i in p), reverse=True)
    while (source := room.next_source()) is not None:
        holders = next((p for p in ranked if min(room.left[i] for i in p) > 0), None)
        if holders is None:
            break
        routes.append(room.take(Route(source, holders)))
    return routes


def _bottleneck_matching(costs: Matrix) -> list[tuple[int, int]]:
    """Return the largest matching (row, column) whose largest cost is least."""
    levels = np.unique(costs)
    full = min(costs.shape)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_matching(costs <= levels[middle])) == full:
            high = middle
        else:
            low = middle + 1
    return _matching(costs <= levels[low])


def _matching(allowed: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> list[tuple[int, int]]:
    columns = maximum_bipartite_matching(csr_array(allowed.astype(np.int8)), perm_type="column")
    return [(row, int(column)) for row, column in enumerate(columns) if column >= 0]


Policy = Callable[[RoutingNetwork, Collection[int], Random], list[Route]]

# SWARM with a recompute differs in how it recovers, not in where it sends.
POLICIES: dict[str, Policy] = {
    "swarm": swarm,
    "swarm-recompute": swarm,
    "greedy": greedy,
    "dt-fm": dt_fm,
    "petals": petals,
    "random": random_routes,
}
