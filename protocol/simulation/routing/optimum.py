"""What routing could reach at best: an exact linear program, solved by HiGHS.

With one data node it is a minimum-cost maximum flow, whose vertices are whole numbers. With
several, each flow has to return to its own, which makes it a multicommodity problem: the program's
cost is then a lower bound, and whole flows may not reach it.

Most links are never used, so the program begins with the cheapest ones of each node and adds those
that could still lower the cost, by their reduced costs, until there is none: the result is exact.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from protocol.simulation.routing.network import Matrix, RoutingNetwork
from protocol.simulation.routing.policies import greedy

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
_CHEAPEST = 8  # links of a node, in each direction, to begin with
_TOLERANCE = 1e-7  # of the dearest link: a reduced cost below it is none


class Optimum(NamedTuple):
    """The maximum flow, and the least total cost (s) at which it can flow."""

    flow: int
    sum_s: float

    @property
    def mean_s(self) -> float:
        """The mean cost of a path."""
        return self.sum_s / self.flow if self.flow else 0.0


def optimum(network: RoutingNetwork, alive: Collection[int] | None = None) -> Optimum:
    """Return the best that the nodes in ``alive`` (None: all) could do together."""
    flow = network.max_flow(alive)
    if flow == 0:
        return Optimum(0, 0.0)
    return Optimum(flow, _Program(network, alive or range(network.num_nodes), flow).least_cost())


class _Program:
    """min cost.x over arcs (data node k, link i -> j), subject to what follows.

    - what enters a holder for data node k leaves it for k;
    - what enters a holder is at most its capacity;
    - what leaves data node k is at most its demand, and all of them together send ``flow``.
    """

    def __init__(self, network: RoutingNetwork, alive: Collection[int], flow: int) -> None:
        self._network, self._flow = network, flow
        present = set(alive)
        stages = [
            np.array([i for i in network.holders_of(s) if i in present], dtype=np.int64)
            for s in range(network.num_stages + 1)
        ]
        self._num_data_nodes = len(stages[0])
        arcs: list[tuple[Indices, Indices, Indices, Mask]] = []
        for k, node in enumerate(stages[0]):
            own = np.array([node])
            for tails, heads in pairwise([own, *stages[1:], own]):
                cheap = _cheapest(network.cost_s[np.ix_(tails, heads)]).ravel()
                owners = np.full(cheap.size, k)
                arcs.append(
                    (owners, np.repeat(tails, len(heads)), np.tile(heads, len(tails)), cheap)
                )
        self._owners, self._tails, self._heads, self._is_in = map(
            np.concatenate, zip(*arcs, strict=True)
        )
        self._cost_s = network.cost_s[self._tails, self._heads]
        self._add_feasible(present, stages[0])

    def _add_feasible(self, present: set[int], data_nodes: Indices) -> None:
        """Add the links of some maximum flow: with the cheapest links alone there may be none."""
        size, owner = self._network.num_nodes, {int(node): k for k, node in enumerate(data_nodes)}
        routes = greedy(self._network, sorted(present), Random(0))  # noqa: S311 - it draws nothing
        hops = {(owner[r.data_node] * size + i) * size + j for r in routes for i, j in r.hops}
        keys = (self._owners * size + self._tails) * size + self._heads
        self._is_in |= np.isin(keys, np.fromiter(hops, dtype=np.int64))

    def least_cost(self) -> float:
        """Solve it; return the total cost in s."""
        equal, at_most = self._rows(np.arange(len(self._tails)))
        room = np.where(
            np.array(self._network.stages) > 0, self._network.capacities, self._network.demands
        )
        goal = np.append(np.zeros(equal.shape[0] - 1), self._flow)
        tolerance_s = _TOLERANCE * float(self._cost_s.max())
        while True:
            arcs = np.flatnonzero(self._is_in)
            solution = linprog(
                self._cost_s[arcs],
                A_ub=at_most[:, arcs],
                b_ub=room,
                A_eq=equal[:, arcs],
                b_eq=goal,
                method="highs",
            )
            assert solution.status == 0, solution.message
            worth_s = solution.eqlin.marginals @ equal + solution.ineqlin.marginals @ at_most
            missing = (self._cost_s - worth_s < -tolerance_s) & ~self._is_in
            if not missing.any():
                return float(solution.fun)
            self._is_in |= missing

    def _rows(self, arcs: Indices) -> tuple[csr_array, csr_array]:
        """Return the equations (balances, then the total flow) and the limits, over all arcs."""
        stages, size = np.array(self._network.stages), self._network.num_nodes
        into, out_of = stages[self._heads] > 0, stages[self._tails] > 0
        leaves = ~out_of
        balance = _sparse(
            np.concatenate([self._owners[into], self._owners[out_of]]) * size
            + np.concatenate([self._heads[into], self._tails[out_of]]),
            np.concatenate([arcs[into], arcs[out_of]]),
            np.concatenate([np.ones(into.sum()), -np.ones(out_of.sum())]),
            (self._num_data_nodes * size, len(arcs)),
        )
        ones = np.ones(leaves.sum())
        total = _sparse(np.zeros(len(ones), dtype=np.int64), arcs[leaves], ones, (1, len(arcs)))
        # A holder's row counts what enters it; a data node's what leaves it.
        load = _sparse(
            np.concatenate([self._heads[into], self._tails[leaves]]),
            np.concatenate([arcs[into], arcs[leaves]]),
            np.ones(into.sum() + leaves.sum()),
            (size, len(arcs)),
        )
        return csr_array(vstack([balance, total])).tocsc(), load.tocsc()


def _cheapest(costs: Matrix) -> Mask:
    """Mark the cheapest of each row and of each column."""
    marked = np.zeros(costs.shape, dtype=np.bool_)
    for axis in (0, 1):
        count = min(_CHEAPEST, costs.shape[axis])
        order = np.argpartition(costs, count - 1, axis=axis)
        np.put_along_axis(marked, np.take(order, range(count), axis=axis), True, axis=axis)
    return marked


def _sparse(
    rows: Indices, columns: Indices, values: npt.NDArray[np.float64], shape: tuple[int, int]
) -> csr_array:
    return csr_array((values, (rows, columns)), shape=shape)
