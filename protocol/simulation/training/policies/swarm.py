"""SWARM as released, and as GWTF's authors read it (spec 3 and 1.7)."""

from __future__ import annotations

import heapq

from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.policies.base import Policy, Recovery, World

_ALPHA = 0.1  # of hivemind's PerformanceEMA
_INITIAL_S = 1.0  # per unit of work, until a peer was measured
_BACKWARD_SIZE = 2.5


class _Ema:
    """Seconds per unit of work as a trainer sees them, links and queues included.

    Requests that overlap count from the last answer on, as in hivemind's ``update_threadsafe``.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._num = 0
        self._last_s = 0.0

    @property
    def seconds(self) -> float:
        """The mean, corrected for its start at 0."""
        if not self._num:
            return _INITIAL_S
        return self._mean_s / (1 - (1 - _ALPHA) ** self._num)

    def update(self, now: float, took_s: float, size: float) -> None:
        """An answer came, ``took_s`` after its request."""
        interval_s = max(0.0, now - max(now - took_s, self._last_s))
        self._last_s = now
        self._num += 1
        self._mean_s += _ALPHA * (interval_s / size - self._mean_s)


class _Balancer:
    """A trainer's heap of one stage: (assigned expected time, tie, holder)."""

    def __init__(self, world: World, stage: int) -> None:
        self._world, self._stage = world, stage
        self._heap: list[tuple[float, float, int]] = []
        self._known: set[int] = set()
        self.emas: dict[int, _Ema] = {}

    def choose(self, avoid: int | None) -> int:
        """Pop the holder with the least assigned time and assign it one more microbatch."""
        self._refresh()
        skipped = []
        while True:
            load_s, tie, node = heapq.heappop(self._heap)
            if node not in self._known:
                continue
            if node == avoid and any(entry[2] in self._known for entry in self._heap):
                skipped.append((load_s, tie, node))
                continue
            break
        expected_s = self.emas[node].seconds * (1 + _BACKWARD_SIZE)
        for entry in [(load_s + expected_s, self._world.rng.random(), node), *skipped]:
            heapq.heappush(self._heap, entry)
        return node

    def _refresh(self) -> None:
        """Newcomers enter at the current minimum; who is gone leaves when its turn comes."""
        present = set(self._world.holders(self._stage))
        base_s = self._heap[0][0] if self._heap else 0.0
        for node in sorted(present - self._known):
            self.emas[node] = _Ema()
            heapq.heappush(self._heap, (base_s, self._world.rng.random(), node))
        self._known = present


class Swarm(Policy):
    """Each data node keeps a heap per stage. The backward pass returns to the same holders.

    That is kinder than the released code, which sends everything through the trainer and computes
    every forward pass twice.
    """

    name = "swarm"
    recovery = Recovery.DATA_NODE

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """Give each data node its heaps."""
        self._balancers = {
            (data_node, stage): _Balancer(world, stage)
            for data_node in world.fleet.network.data_nodes
            for stage in range(1, world.num_stages + 1)
        }
        return super().attach(world, stages)

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """The least assigned time; links are seen only in the measured answers."""
        return self._balancers[microbatch.data_node, stage].choose(microbatch.path[stage])

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """The next of the heap, as for any request."""
        return self.next_hop(microbatch, stage)

    def answered(self, microbatch: Microbatch, stage: int, seconds: float, size: float) -> None:
        """Update what the data node believes of this holder."""
        ema = self._balancers[microbatch.data_node, stage].emas[microbatch.holder(stage)]
        ema.update(self.world.agenda.now, seconds, size)

    def choose_stage(self, newcomer: int) -> int:
        """Any: the released code has no rebalancing, who starts a server says which stage."""
        return self.world.rng.randint(1, self.world.num_stages)


class SwarmRecompute(Swarm):
    """The paper's reading: a crash in the backward pass costs the whole pipeline again."""

    name = "swarm-recompute"
    recovery = Recovery.RESTART
