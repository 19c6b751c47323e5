"""DT-FM: a centre places nodes on stages and ties them to fixed pipelines (spec 3).

A genetic search there, annealing here; both minimise the worst data-parallel exchange plus the tour
through the stages. Ours is kinder in three ways: it knows compute seconds and memory, a data node
takes whichever pipeline is free, and newcomers go where a stage is short without anybody moving.
What it lacks is a way to go on alone: when a node dies, its pipeline stands still until the centre
has noticed and solved again (``SOLVE_S``), and its microbatches begin anew.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
from scipy.optimize import linear_sum_assignment

from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.policies.base import Policy, Recovery, World

SOLVE_S = 5.0  # for the search and for telling everybody; the published one runs for minutes
_TRIALS = 1500

Pipeline = tuple[int, ...]


class DtFm(Policy):
    """Static pipelines of one node per stage; the centre is data node 0."""

    name = "dt-fm"
    recovery = Recovery.RESTART

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """Place all nodes anew; that took place before training began and is not counted."""
        super().attach(world, stages)
        self._used: Counter[Pipeline] = Counter()
        self._of: dict[int, Pipeline] = {}
        self._pipelines: list[Pipeline] = []
        self._num_solved = 0
        placed = _anneal(world, stages)
        by_stage = _members(placed, world.num_stages)
        self._pipelines = self._tie(by_stage)
        return placed

    def opening_s(self) -> float:
        """Solve again if anybody came or went."""
        members = [list(self.world.holders(k)) for k in range(1, self.world.num_stages + 1)]
        pipelines = self._tie(members)
        if pipelines == self._pipelines:
            return 0.0
        self._pipelines = pipelines
        self._num_solved += 1
        return SOLVE_S

    def lost(self, node: int) -> None:
        """The pipeline stands still; the centre begins to solve."""
        self._pipelines = [p for p in self._pipelines if node not in p]
        self._num_solved += 1
        mine = self._num_solved
        self.world.agenda.after(SOLVE_S, lambda: self._solved(mine))

    def _solved(self, mine: int) -> None:
        """Tie those anew that are in no whole pipeline; the others go on as they are."""
        if mine != self._num_solved:
            return
        tied = {n for p in self._pipelines for n in p}
        left = [
            [n for n in self.world.holders(k) if n not in tied]
            for k in range(1, self.world.num_stages + 1)
        ]
        self._pipelines = [*self._pipelines, *self._tie(left)]
        for members in left:
            for _ in members:
                self.world.count_message()
        self.world.issue()

    def _tie(self, members: list[list[int]]) -> list[Pipeline]:
        """Match the nodes of consecutive stages so that the sum of their links is least."""
        world = self.world
        count = min(map(len, members))
        pipelines: list[Pipeline] = [(n,) for n in members[0]] if count else []
        for far in members[1:] if count else []:
            near = [p[-1] for p in pipelines]
            rows, columns = linear_sum_assignment(_costs(world, near, far))
            pairs = zip(rows.tolist(), columns.tolist(), strict=True)
            pipelines = [(*pipelines[a], far[b]) for a, b in pairs]
        return sorted(pipelines)

    # --- microbatches ------------------------------------------------------------------------

    def may_start(self, data_node: int) -> bool:
        """While a pipeline has room."""
        return super().may_start(data_node) and self._best(data_node) is not None

    def _room(self, pipeline: Pipeline) -> int:
        return min(self.world.fleet.capacity(n) for n in pipeline) - self._used[pipeline]

    def _best(self, data_node: int) -> Pipeline | None:
        """The pipeline with the most room, then the nearest one."""
        fleet = self.world.fleet
        free = [p for p in self._pipelines if self._room(p) > 0]
        return max(
            free,
            key=lambda p: (
                self._room(p), -fleet.cost_s(data_node, p[0]) - fleet.cost_s(p[-1], data_node)
            ),
            default=None,
        )  # fmt: skip

    def started(self, microbatch: Microbatch) -> None:
        """It takes one pipeline from end to end."""
        pipeline = self._best(microbatch.data_node)
        assert pipeline is not None
        self._of[microbatch.number] = pipeline
        self._used[pipeline] += 1

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """The pipeline's next node; the centre has not said yet what to do if that is gone."""
        return self._of[microbatch.number][stage - 1]

    def gives_up(self, microbatch: Microbatch, node: int) -> bool:
        """Its pipeline is broken."""
        return node in self._of[microbatch.number]

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """For lost sums: any other holder, the one that is done first."""
        return self.earliest(microbatch, stage)

    def ended(self, microbatch: Microbatch) -> None:
        """Its pipeline has room again."""
        self._used[self._of.pop(microbatch.number)] -= 1


def _members(stages: dict[int, int], num_stages: int) -> list[list[int]]:
    return [sorted(n for n, s in stages.items() if s == k) for k in range(1, num_stages + 1)]


def _costs(
    world: World, near: list[int], far: list[int]
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([[world.fleet.cost_s(a, b) for b in far] for a in near])


def _anneal(world: World, stages: dict[int, int]) -> dict[int, int]:
    """Swap nodes between stages; the sizes of the stages stay."""
    rng = Random(world.rng.getrandbits(64))  # noqa: S311 (a simulation)
    placed, nodes = dict(stages), sorted(stages)
    cost_s = _placement_s(world, placed)
    best, best_s, warmth_s = dict(placed), cost_s, cost_s / 20
    for trial in range(_TRIALS):
        a, b = rng.sample(nodes, 2)
        if placed[a] == placed[b]:
            continue
        placed[a], placed[b] = placed[b], placed[a]
        changed_s = _placement_s(world, placed)
        heat_s = warmth_s * (1 - trial / _TRIALS)
        if changed_s <= cost_s or rng.random() < math.exp((cost_s - changed_s) / max(heat_s, 1e-9)):
            cost_s = changed_s
            if cost_s < best_s:
                best, best_s = dict(placed), cost_s
        else:
            placed[a], placed[b] = placed[b], placed[a]
    return best


def _placement_s(world: World, placed: dict[int, int]) -> float:
    """The slowest stage's exchange, and the mean tour through the stages, there and back."""
    members = _members(placed, world.num_stages)
    exchange_s = max(world.fleet.aggregation_s(m) for m in members)
    tour_s = 0.0
    for near, far in pairwise(members):
        costs = _costs(world, near, far)
        tour_s += float(costs[linear_sum_assignment(costs)].mean())
    for data_node in world.fleet.network.data_nodes:
        for end in (members[0], members[-1]):
            tour_s += float(_costs(world, [data_node], end).mean())
    return exchange_s + 2 * tour_s
