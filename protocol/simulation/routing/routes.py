"""Routes through the stages: what a router's work is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from protocol.simulation.routing.network import RoutingNetwork


class Route(NamedTuple):
    """One flow: from a data node over a holder of each stage back to the same data node."""

    data_node: int
    holders: tuple[int, ...]

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The links that it takes, in order."""
        return tuple(pairwise((self.data_node, *self.holders, self.data_node)))


@dataclass(frozen=True)
class Worth:
    """Flows, then costs (s): a router is judged in this order."""

    flow: int
    max_s: float
    sum_s: float

    @property
    def mean_s(self) -> float:
        """The mean cost of a path; 0 if there is none."""
        return self.sum_s / self.flow if self.flow else 0.0


def cost_s(network: RoutingNetwork, route: Route) -> float:
    """Return the cost of one route."""
    return sum(float(network.cost_s[i, j]) for i, j in route.hops)


def worth(network: RoutingNetwork, routes: Sequence[Route]) -> Worth:
    """Judge a set of routes."""
    costs = [cost_s(network, route) for route in routes]
    return Worth(len(costs), max(costs, default=0.0), sum(costs))


def faults(network: RoutingNetwork, routes: Iterable[Route]) -> list[str]:
    """Say what is impossible about a set of routes: wrong stages, or more than a node can carry."""
    found = []
    used: Counter[int] = Counter()
    for route in routes:
        if [network.stages[i] for i in route.holders] != list(range(1, network.num_stages + 1)):
            found.append(f"{route} does not visit each stage once, in order")
        used.update(route.holders)
        used[route.data_node] += 1
    for i, count in sorted(used.items()):
        room = network.capacities[i] if network.stages[i] else network.demands[i]
        if count > room:
            found.append(f"{network.names[i]} carries {count} flows and can carry {room}")
    return found
