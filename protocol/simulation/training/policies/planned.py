"""Policies that know everything at once: cheapest path, Petals' path, chance."""

from __future__ import annotations

from collections import Counter

from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.policies.base import Policy, Recovery, World

_PETALS_HOP_S = 0.018
_PETALS_FULL_S = 10.0


class Greedy(Policy):
    """The cheapest path (d_ij) through whoever has room, planned when a microbatch starts.

    An oracle: it knows everybody's room at every moment, what other plans will take of it too, and
    uses that without sending a message.
    """

    name = "greedy"

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """Nothing is planned yet."""
        self._planned: Counter[int] = Counter()
        return super().attach(world, stages)

    def room(self, node: int) -> int:
        """Return what a holder has room for, beside those that are planned to come."""
        return self.world.room(node) - self._planned[node]

    def weight_s(self, source: int, target: int) -> float:
        """Return what a hop is worth; who is full is passed over as long as anybody is not."""
        full_s = 0.0 if self.world.stage_of(target) == 0 else self._full_s(target)
        return self.world.fleet.cost_s(source, target) + full_s

    def _full_s(self, node: int) -> float:
        missing = 1 - self.room(node)
        return missing * 1e3 if missing > 0 else 0.0

    def started(self, microbatch: Microbatch) -> None:
        """Find the path of least weight, from the sink backwards."""
        world, sink = self.world, microbatch.data_node
        best: dict[int, tuple[float, tuple[int, ...]]] = {sink: (0.0, ())}
        for stage in range(world.num_stages, 0, -1):
            best = {
                node: min(
                    (self.weight_s(node, beyond) + cost_s, (beyond, *path))
                    for beyond, (cost_s, path) in best.items()
                )
                for node in world.holders(stage)
            }
        _, microbatch.plan = min(
            (self.weight_s(sink, first) + cost_s, (first, *path))
            for first, (cost_s, path) in best.items()
        )
        microbatch.plan = microbatch.plan[:-1]
        self._planned.update(microbatch.plan)

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """The planned holder, or the cheapest one if that is gone."""
        if len(microbatch.plan) > self.world.num_stages - stage:
            planned, *beyond = microbatch.plan
            microbatch.plan = tuple(beyond)
            self._planned[planned] -= 1
            if planned in self.world.holders(stage):
                return planned
        before = microbatch.holder(stage - 1)
        return min(self.world.holders(stage), key=lambda n: (self.weight_s(before, n), n))

    def ended(self, microbatch: Microbatch) -> None:
        """What was planned and not used is free."""
        self._planned.subtract(microbatch.plan)


class Petals(Greedy):
    """Petals: Dijkstra over latency, 18 ms and 1/throughput, 10 s more for who has no room."""

    name = "petals"
    recovery = Recovery.DATA_NODE

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """A path of one hop."""
        return self.next_hop(microbatch, stage)

    def weight_s(self, source: int, target: int) -> float:
        """Bandwidth is not looked at."""
        world = self.world
        weight_s = world.fleet.latency_s(source, target) + _PETALS_HOP_S
        if world.stage_of(target) == 0:
            return weight_s
        full_s = _PETALS_FULL_S if self.room(target) <= 0 else 0.0
        return weight_s + world.fleet.compute_s(target) + full_s

    def choose_stage(self, newcomer: int) -> int:
        """The stage whose summed throughput is least."""
        world = self.world

        def throughput(stage: int) -> float:
            return sum(1 / max(world.fleet.compute_s(n), 1e-9) for n in world.holders(stage))

        return min(range(1, world.num_stages + 1), key=lambda s: (throughput(s), s))


class Chance(Policy):
    """Any holder, in proportion to its room (to its capacity if nobody has any)."""

    name = "random"

    def next_hop(self, microbatch: Microbatch, stage: int) -> int:
        """Draw one."""
        world = self.world
        holders = world.holders(stage)
        rooms = [max(0, world.room(n)) for n in holders]
        weights = rooms if any(rooms) else [max(1, world.fleet.capacity(n)) for n in holders]
        return world.rng.choices(holders, weights)[0]

    def choose_stage(self, newcomer: int) -> int:
        """Any."""
        return self.world.rng.randint(1, self.world.num_stages)
