"""What ``benchmarks/training.py`` compares: settings, and policies with something changed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import linprog

from protocol.simulation.routing.families import in_regions
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.training import POLICIES, Workload
from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.policies import Policy
from protocol.simulation.training.policies.gwtf import Gwtf

SWARM_TIMEOUT_S = 30.0  # the released one, forward; 75 s backward, which is not used here


@dataclass(frozen=True)
class Setting:
    """A kind of swarm, drawn by seed, and its work."""

    title: str
    nodes: int = 33
    stages: int = 8
    drawn: dict[str, Any] = field(default_factory=dict)
    workload: Workload = field(default_factory=Workload)

    def network(self, seed: int) -> RoutingNetwork:
        """Draw the swarm of a seed."""
        return in_regions(self.nodes, self.stages, seed, **self.drawn)


SETTINGS = {
    "mixed": Setting("Heterogeneous computers"),
    "alike": Setting("Equal computers", drawn={"capacity": (3, 3), "compute_s": (0.4,)}),
    # Fixed before its first run. 0.22 s forward: 0.055 s for each of 4 layers (spec 2.1).
    "paper": Setting(
        "As the paper has it",
        nodes=20,
        stages=6,
        drawn={
            "num_data_nodes": 2,
            "capacity": (1, 3),
            "compute_s": (0.1375, 0.275, 0.55),
            "payload_bytes": 16 * 2**20,
        },
        workload=Workload(
            microbatches=32, weight_bytes=400e6, backward_ratio=1.5, detect_s=6.5, is_exact=False
        ),
    ),
}


class BestFlows(Policy):
    """Exact minimum-cost flows among those who live, known to all at once: perfect routing.

    For one data node, whose flows are then whole numbers.
    """

    name = "best flows"

    def attach(self, world: Any, stages: dict[int, int]) -> dict[int, int]:
        """Nothing is planned yet."""
        self._units: list[tuple[int, ...]] = []
        self._of: dict[int, tuple[int, ...]] = {}
        return super().attach(world, stages)

    def opens(self) -> None:
        """Solve for who is there."""
        self._solve()

    def lost(self, node: int) -> None:
        """Solve again at once."""
        self._solve()

    def may_start(self, data_node: int) -> bool:
        """While a unit is free."""
        return bool(self._free())

    def started(self, microbatch: Microbatch) -> None:
        """Take the cheapest free unit."""
        self._of[microbatch.number] = self._free()[0]

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """Along the unit; if it is broken, to whoever is done first."""
        node = self._of[microbatch.number][stage - 1]
        return node if node in self.world.holders(stage) else self.earliest(microbatch, stage)

    def ended(self, microbatch: Microbatch) -> None:
        """The unit is free."""
        del self._of[microbatch.number]

    def _free(self) -> list[tuple[int, ...]]:
        free = list(self._units)
        for unit in self._of.values():
            if unit in free:
                free.remove(unit)
        return free if len(self._of) < len(self._units) else []

    def _solve(self) -> None:
        world = self.world
        (data_node,) = world.fleet.network.data_nodes
        layers = [(data_node,), *map(world.holders, range(1, world.num_stages + 1)), (data_node,)]
        flow = min(sum(map(world.fleet.capacity, layer)) for layer in layers[1:-1])
        arcs = [
            (stage, a, b)
            for stage, (near, far) in enumerate(pairwise(layers))
            for a in near
            for b in far
        ]
        used = self._least(arcs, layers, flow)
        self._units = []
        for _ in range(flow):
            path = [data_node]
            for stage in range(len(layers) - 1):
                near, best = path[-1], world.fleet.cost_s
                onward = [b for b in layers[stage + 1] if used.get((stage, near, b), 0)]
                path.append(min(onward, key=lambda b, near=near: best(near, b)))  # type: ignore[misc]
                used[stage, near, path[-1]] -= 1
            self._units.append(tuple(path[1:-1]))
        self._units.sort(key=self._cost_s)

    def _cost_s(self, unit: tuple[int, ...]) -> float:
        (data_node,) = self.world.fleet.network.data_nodes
        return sum(
            self.world.fleet.cost_s(a, b) for a, b in pairwise((data_node, *unit, data_node))
        )

    def _least(
        self, arcs: list[tuple[int, int, int]], layers: list[tuple[int, ...]], flow: int
    ) -> dict[tuple[int, int, int], int]:
        """Return the units on each arc of a cheapest flow of this size."""
        fleet = self.world.fleet
        inner = [(stage, n) for stage in range(1, len(layers) - 1) for n in layers[stage]]
        row = {key: k for k, key in enumerate(inner)}
        balance, load = np.zeros((len(inner) + 1, len(arcs))), np.zeros((len(inner), len(arcs)))
        for k, (stage, a, b) in enumerate(arcs):
            if stage == 0:
                balance[-1, k] = 1
            else:
                balance[row[stage, a], k] = -1
            if (stage + 1, b) in row:
                balance[row[stage + 1, b], k] = 1
                load[row[stage + 1, b], k] = 1
        solution = linprog(
            [fleet.cost_s(a, b) for _, a, b in arcs],
            A_ub=load,
            b_ub=[fleet.capacity(n) for _, n in inner],
            A_eq=balance,
            b_eq=[0] * len(inner) + [flow],
            method="highs",
        )
        return {arc: round(x) for arc, x in zip(arcs, solution.x, strict=True)}


class MoreUnderWay(Gwtf):
    """More microbatches than flows, as far as late stages hold each of them less long."""

    def may_start(self, data_node: int) -> bool:
        """Beyond the flows by as much as the narrowest stage passes more than it has room for."""
        world, fleet = self.world, self.world.fleet
        window = self._routers[data_node].window(self._decision, world.agenda.now)
        rooms = {
            stage: sum(map(fleet.capacity, world.holders(stage)))
            for stage in range(1, world.num_stages + 1)
        }
        trip = 2 * (world.num_stages + 1)
        passing = min(room * trip / (trip - stage) for stage, room in rooms.items())
        return world.in_flight(data_node) < max(window, int(window * passing / min(rooms.values())))


def _joins_as_gwtf(name: str) -> type[Policy]:
    return type(name, (POLICIES[name],), {"choose_stage": Policy.choose_stage})


def _joins_anywhere(name: str) -> type[Policy]:
    return type(name, (POLICIES[name],), {"choose_stage": POLICIES["random"].choose_stage})


_JOINING = "joining as gwtf"
CHANGED: dict[str, type[Policy]] = {
    **{f"{p}, {_JOINING}": _joins_as_gwtf(p)
       for p in ("swarm", "swarm-recompute", "petals", "random")},
    "gwtf, joining any stage": _joins_anywhere("gwtf"),
    "best flows": BestFlows,
    "gwtf, more under way": MoreUnderWay,
}  # fmt: skip
SLOW = {f"{p}, its time-out": POLICIES[p] for p in ("swarm", "swarm-recompute")}
BESIDE_PAPER = (*SLOW, "gwtf, more under way")


def arm(name: str, workload: Workload) -> tuple[Policy, Workload]:
    """Return a fresh policy by the name of its row, and the work as it meets it."""
    if name in SLOW:
        return SLOW[name](), replace(workload, detect_s=SWARM_TIMEOUT_S)
    return {**POLICIES, **CHANGED}[name](), workload
