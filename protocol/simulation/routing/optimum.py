"""What routing could reach at best: an exact linear program, solved by HiGHS.

With one data node it is a minimum-cost maximum flow, whose vertices are whole numbers. With
several, each flow has to return to its own, which makes it a multicommodity problem: the program's
cost is then a lower bound, and whole flows may not reach it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array, vstack

from protocol.simulation.routing.network import RoutingNetwork

Indices = npt.NDArray[np.int64]


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
    program = _Program(network, range(network.num_nodes) if alive is None else alive)
    return Optimum(flow, program.least_cost(flow))


@dataclass
class _Program:
    """min cost.x over arcs (data node k, link i -> j), subject to what follows.

    - what enters a holder for data node k leaves it for k;
    - what enters a holder is at most its capacity;
    - what leaves data node k is at most its demand, and all of them together send ``flow``.
    """

    network: RoutingNetwork
    alive: Collection[int]
    tails: list[Indices] = field(default_factory=list)
    heads: list[Indices] = field(default_factory=list)
    owners: list[Indices] = field(default_factory=list)

    def __post_init__(self) -> None:
        present = set(self.alive)
        stages = [
            np.array([i for i in self.network.holders_of(s) if i in present], dtype=np.int64)
            for s in range(self.network.num_stages + 1)
        ]
        for k, node in enumerate(stages[0]):
            own = np.array([node])
            layers = [own, *stages[1:], own]
            for tails, heads in pairwise(layers):
                self.tails.append(np.repeat(tails, len(heads)))
                self.heads.append(np.tile(heads, len(tails)))
                self.owners.append(np.full(len(tails) * len(heads), k))
        self.num_data_nodes = len(stages[0])

    def least_cost(self, flow: int) -> float:
        """Solve it; return the total cost in s."""
        network = self.network
        tails, heads, owners = map(np.concatenate, (self.tails, self.heads, self.owners))
        arcs = np.arange(len(tails))
        stages, num_nodes = np.array(network.stages), network.num_nodes
        into, out_of = stages[heads] > 0, stages[tails] > 0
        balance = _rows(
            np.concatenate([owners[into], owners[out_of]]) * num_nodes
            + np.concatenate([heads[into], tails[out_of]]),
            np.concatenate([arcs[into], arcs[out_of]]),
            np.concatenate([np.ones(into.sum()), -np.ones(out_of.sum())]),
            (self.num_data_nodes * num_nodes, len(arcs)),
        )
        leaves = ~out_of
        total = _rows(np.zeros(leaves.sum()), arcs[leaves], np.ones(leaves.sum()), (1, len(arcs)))
        # A holder's row counts what enters it; a data node's what leaves it.
        load = _rows(
            np.concatenate([heads[into], tails[leaves]]),
            np.concatenate([arcs[into], arcs[leaves]]),
            np.ones(into.sum() + leaves.sum()),
            (num_nodes, len(arcs)),
        )
        room = np.where(stages > 0, network.capacities, network.demands)
        solution = linprog(
            network.cost_s[tails, heads],
            A_ub=load,
            b_ub=room,
            A_eq=vstack([balance, total]),
            b_eq=np.append(np.zeros(balance.shape[0]), flow),
            method="highs",
        )
        assert solution.status == 0, solution.message
        return float(solution.fun)


def _rows(
    rows: npt.NDArray[np.float64] | Indices,
    columns: Indices,
    values: npt.NDArray[np.float64],
    shape: tuple[int, int],
) -> csr_array:
    return csr_array((values, (rows.astype(np.int64), columns)), shape=shape)
