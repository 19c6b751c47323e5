"""The reference optimum against another solver, and the policies against the optimum."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import networkx
import numpy as np
import pytest

from protocol.simulation.routing import optimum as module
from protocol.simulation.routing.families import N33, Family, in_regions
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.routing.optimum import optimum
from protocol.simulation.routing.policies import POLICIES
from protocol.simulation.routing.routes import Route, cost_s, faults, worth

_PER_S = 10**6  # networkx wants whole numbers
SMALL = Family(14, num_stages=3, num_data_nodes=2)


def by_networkx(network: RoutingNetwork, alive: range | list[int]) -> tuple[int, float]:
    """Return maximum flow and least cost for one data node, by network simplex."""
    (source,) = network.data_nodes
    graph = networkx.DiGraph()
    present = [i for i in alive if network.stages[i] > 0]
    for i in present:
        graph.add_edge((i, "in"), (i, "out"), capacity=network.capacities[i], weight=0)
    ends = [("source", source, 0)] + [((i, "out"), i, network.stages[i]) for i in present]
    for tail, i, stage in ends:
        for j in present:
            if network.stages[j] == stage + 1:
                weight = round(network.cost_s[i, j] * _PER_S)
                graph.add_edge(tail, (j, "in"), weight=weight)
        if stage == network.num_stages:
            graph.add_edge(tail, "sink", weight=round(network.cost_s[i, source] * _PER_S))
    graph.add_edge("demand", "source", capacity=network.demands[source], weight=0)
    flows = networkx.max_flow_min_cost(graph, "demand", "sink")
    total = networkx.cost_of_flow(graph, flows) / _PER_S
    return sum(flows["demand"].values()), total


@pytest.mark.parametrize("seed", range(3))
def test_optimum_is_that_of_networkx(seed: int) -> None:
    network = N33.network(seed)
    best = optimum(network)
    flow, sum_s = by_networkx(network, range(network.num_nodes))
    assert (best.flow, best.sum_s) == (flow, pytest.approx(sum_s, rel=1e-5))


def test_links_that_are_not_looked_at_first_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Family(41, num_stages=4).network(3)
    whole = optimum(network)
    monkeypatch.setattr(module, "_CHEAPEST", 1)
    assert optimum(network) == (whole.flow, pytest.approx(whole.sum_s))
    several = Family(42, num_stages=4, num_data_nodes=2).network(3)
    few = optimum(several)
    monkeypatch.setattr(module, "_CHEAPEST", 99)
    assert few.sum_s == pytest.approx(optimum(several).sum_s)


def test_optimum_of_survivors_is_that_of_networkx() -> None:
    network = in_regions(33, 4, seed=1)
    alive = [i for i in range(network.num_nodes) if i % 3 != 1]
    best = optimum(network, alive)
    flow, sum_s = by_networkx(network, alive)
    assert (best.flow, best.sum_s) == (flow, pytest.approx(sum_s, rel=1e-5))
    assert best.flow < optimum(network).flow


def test_a_link_back_is_worth_what_it_costs() -> None:
    """Where greedy takes the wrong first path, the best one undoes a link: its sign matters."""
    network = crossing()
    greedy = POLICIES["greedy"](network, range(5), Random(0))
    assert worth(network, greedy).sum_s == pytest.approx(3 + 103)
    assert optimum(network).sum_s == pytest.approx(4 + 4)


def crossing() -> RoutingNetwork:
    """1.1 -> 2.1 is cheapest, but then 1.2 -> 2.2 has to be taken as well."""
    network = Family(5, num_stages=2, capacity=(1, 1), cost_s=(1.0, 1.0)).network(0)
    costs = [[1.0] * 5 for _ in range(5)]
    for i, j, cost in ((1, 3, 1.0), (1, 4, 2.0), (2, 3, 2.0), (2, 4, 101.0)):
        costs[i][j] = costs[j][i] = cost
    bandwidth = [[network.payload_bytes / cost for cost in row] for row in costs]
    return replace(
        network, latency_s=np.zeros((5, 5)), bandwidth_bytes_s=np.array(bandwidth)
    ).with_demand(2)


def test_several_data_nodes_each_get_their_own_flows_back() -> None:
    """Two separate halves: nothing may go from one data node to the other, however cheap."""
    network = Family(4, num_stages=1, num_data_nodes=2, capacity=(1, 1)).network(0)
    best = optimum(network)
    d1, d2, a, b = range(4)
    straight = [Route(d1, (a,)), Route(d2, (b,))]
    crossed = [Route(d1, (b,)), Route(d2, (a,))]
    sums = [sum(cost_s(network, route) for route in routes) for routes in (straight, crossed)]
    assert best.sum_s == pytest.approx(min(sums))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("network", [N33.network(4), SMALL.network(4), in_regions(26, 5, seed=4)])
def test_policies_give_possible_routes_and_none_beats_the_optimum(
    name: str, network: RoutingNetwork
) -> None:
    alive = [i for i in range(network.num_nodes) if i % 7 != 5]
    routes = POLICIES[name](network, alive, Random(4))
    assert faults(network, routes) == []
    assert {i for route in routes for i in (route.data_node, *route.holders)} <= set(alive)
    best, got = optimum(network, alive), worth(network, routes)
    assert 0 < got.flow <= best.flow
    if got.flow == best.flow:
        assert got.sum_s >= best.sum_s - 1e-6
    assert got.flow == best.flow or name == "dt-fm"


def test_impossible_routes_are_found() -> None:
    network = N33.network(0)
    first = [network.holders_of(s)[0] for s in range(1, 9)]
    assert faults(network, [Route(0, tuple(reversed(first)))])
    assert faults(network, [Route(0, tuple(first))] * 6)
    assert not faults(network, [Route(0, tuple(first))])


def test_order_of_policies_is_that_of_the_literature() -> None:
    """On random links greedy is a little above the optimum, a random choice far."""
    network = Family(49, num_stages=8).network(2)
    best = optimum(network)
    ratios = {
        name: worth(network, POLICIES[name](network, range(49), Random(1))).mean_s / best.mean_s
        for name in ("greedy", "swarm", "random")
    }
    assert 1.0 < ratios["greedy"] < 1.2
    assert min(ratios["swarm"], ratios["random"]) > 1.3
