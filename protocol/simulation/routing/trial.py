"""One simulated run of a router: what happens to the swarm, and what the routes were worth."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from protocol.simulation.routing.measure import whole_routes
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.routing.optimum import Optimum, optimum
from protocol.simulation.routing.policies import POLICIES
from protocol.simulation.routing.routes import Route, Worth, worth
from protocol.simulation.routing.world import Clock, RoutingWorld, WorldOptions

GWTF = "gwtf"
POLICY_NAMES = (GWTF, *POLICIES)
_CONVERGED = 0.001  # of the optimum's cost


@dataclass(frozen=True)
class Script:
    """``burst`` of the holders die at ``burst_tick``, ``churn`` of them every ``churn_every``.

    Who died of churn comes back when the next ones die. Each stage keeps a holder. At the tick of
    the burst there is no churn, so that it is known what the router recovers from. With
    ``after_ticks`` the run ends that long after the burst's survivors have their maximum flow.
    """

    ticks: int = 200
    churn: float = 0.0
    churn_every: int = 30
    burst: float = 0.0
    burst_tick: int | None = None
    after_ticks: int | None = None

    def bursts_at(self, tick: int) -> bool:
        """Whether the burst is at this tick; by default in the middle."""
        at = self.ticks // 2 if self.burst_tick is None else self.burst_tick
        return self.burst > 0 and tick == at

    def churns_at(self, tick: int) -> bool:
        """Whether nodes go and come at this tick."""
        return self.churn > 0 and tick > 0 and tick % self.churn_every == 0


@dataclass(frozen=True)
class Point:
    """The state of the routes after a tick, beside what is possible with those who are there."""

    tick: int
    worth: Worth
    best: Optimum
    messages_per_node: float
    most_messages: tuple[int, int] = (0, 0)  # of a data node, of a holder

    @property
    def ratio(self) -> float:
        """Mean path cost over the optimum's; 0 without any flow."""
        return self.worth.mean_s / self.best.mean_s if self.best.sum_s else 0.0

    @property
    def is_full(self) -> bool:
        """Whether all that can flow does."""
        return self.worth.flow >= self.best.flow


@dataclass(frozen=True)
class Change:
    """Nodes died or came; ``recovered``: ticks from its detection to the maximum flow."""

    tick: int
    kind: str
    num_gone: int
    num_come: int
    best: Optimum
    recovered: int | None


@dataclass
class Trial:
    """A run: the points in time, what happened, and the routes at the end."""

    network: RoutingNetwork
    policy: str
    points: list[Point] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    alive: list[int] = field(default_factory=list)
    greedy: Worth = field(default_factory=lambda: Worth(0, 0.0, 0.0))
    cpu_s: float = 0.0
    digest: str = ""

    @property
    def last(self) -> Point:
        """The state at the end."""
        return self.points[-1]

    @property
    def rounds_to_max_flow(self) -> int | None:
        """The first tick at which all that can flow does."""
        return next((p.tick for p in self.points if p.is_full), None)

    @property
    def rounds_to_converge(self) -> int | None:
        """The tick from which on the flow is whole and the cost within 0.1 % of the last one."""
        found = None
        for point in reversed(self.points):
            if not (point.is_full and point.ratio <= self.last.ratio + _CONVERGED):
                break
            found = point.tick
        return found

    @property
    def messages_per_node_tick(self) -> float:
        """The mean over the whole run."""
        return sum(p.messages_per_node for p in self.points) / len(self.points)


def run_trial(
    network: RoutingNetwork,
    policy: str,
    script: Script,
    seed: int,
    *,
    options: WorldOptions | None = None,
    clock: Clock | None = None,
    on_tick: Callable[[int], None] = lambda _: None,
) -> Trial:
    """Run one policy on one network; ``clock`` measures what the router computes."""
    rng = Random(seed)  # noqa: S311 - a simulation
    options = options or WorldOptions()
    if policy == GWTF:
        router: _Router = _Gwtf(network, rng.getrandbits(64), options, clock)
    else:
        router = _Fixed(network, policy, rng.getrandbits(64))
    return _Run(network, policy, script, options, router, rng).run(on_tick)


class _Router:
    """What a run needs of a router."""

    messages = 0
    sent_by: Sequence[int] = ()
    cpu_s = 0.0
    digest = ""

    def advance(self, tick: int) -> None:
        """Let one tick pass."""

    def change(self, gone: Collection[int], come: Collection[int]) -> None:
        """Nodes die, nodes come."""

    def routes(self) -> list[Route]:
        """Return the whole routes."""
        return []


class _Gwtf(_Router):
    """Real FlowNodes with real messages."""

    def __init__(
        self, network: RoutingNetwork, seed: int, options: WorldOptions, clock: Clock | None
    ) -> None:
        self._world = RoutingWorld(network, seed, options, clock)

    def advance(self, tick: int) -> None:
        self._world.run_until(tick * self._world.tick_s)
        self.messages, self.cpu_s = self._world.num_sent, self._world.cpu_s
        self.sent_by = tuple(self._world.sent_by)
        self.digest = self._world.digest

    def change(self, gone: Collection[int], come: Collection[int]) -> None:
        self._world.crash(gone)
        self._world.join(come)

    def routes(self) -> list[Route]:
        return whole_routes(self._world)


class _Fixed(_Router):
    """Another policy: it knows all and sends nothing; after each change it begins anew."""

    def __init__(self, network: RoutingNetwork, policy: str, seed: int) -> None:
        self._network, self._policy, self._seed = network, POLICIES[policy], seed
        self._alive = set(range(network.num_nodes))
        self._routes = self._assign()

    def _assign(self) -> list[Route]:
        rng = Random(self._seed)  # noqa: S311 - a simulation
        return self._policy(self._network, sorted(self._alive), rng)

    def change(self, gone: Collection[int], come: Collection[int]) -> None:
        self._alive = (self._alive - set(gone)) | set(come)
        self._routes = self._assign()

    def routes(self) -> list[Route]:
        return self._routes


class _Run:
    """Carries out the script and takes notes."""

    def __init__(
        self,
        network: RoutingNetwork,
        policy: str,
        script: Script,
        options: WorldOptions,
        router: _Router,
        rng: Random,
    ) -> None:
        self._network, self._script, self._router, self._rng = network, script, router, rng
        self._detect_ticks = options.detect_s / options.settings.tick_s
        self._trial = Trial(network, policy)
        self._alive = set(range(network.num_nodes))
        self._away: list[int] = []
        self._num_sent = 0
        self._sent_by: Sequence[int] = [0] * network.num_nodes
        self._best = optimum(network)
        self._changes: list[tuple[int, str, int, int, Optimum]] = []

    def run(self, on_tick: Callable[[int], None]) -> Trial:
        trial = self._trial
        for tick in range(1, self._script.ticks + 1):
            self._router.advance(tick)
            self._note(tick)
            self._disturb(tick)
            on_tick(tick)
            if self._is_over(tick):
                break
        trial.changes = list(self._recoveries())
        trial.routes, trial.alive = self._router.routes(), sorted(self._alive)
        trial.greedy = worth(
            self._network, POLICIES["greedy"](self._network, trial.alive, self._rng)
        )
        trial.cpu_s, trial.digest = self._router.cpu_s, self._router.digest
        return trial

    def _is_over(self, tick: int) -> bool:
        """Whether the flow was whole again ``after_ticks`` ago."""
        after = self._script.after_ticks
        if after is None or not self._changes:
            return False
        known = self._changes[-1][0] + self._detect_ticks
        points = reversed(self._trial.points)
        full = [p.tick for p in points if p.tick >= known and p.is_full]
        return bool(full) and tick >= full[-1] + after

    def _note(self, tick: int) -> None:
        sent = self._router.messages - self._num_sent
        self._num_sent = self._router.messages
        value = worth(self._network, self._router.routes())
        mean, most = sent / len(self._alive), self._most_messages()
        self._trial.points.append(Point(tick, value, self._best, mean, most))

    def _most_messages(self) -> tuple[int, int]:
        """What the busiest data node and the busiest holder sent since the last tick."""
        now, before = self._router.sent_by, self._sent_by
        self._sent_by = now or before
        sent = [a - b for a, b in zip(now, before, strict=True)] if now else [0] * len(before)
        nodes, holders = self._network.data_nodes, self._network.holders
        return max(sent[i] for i in nodes), max(sent[i] for i in holders)

    def _disturb(self, tick: int) -> None:
        if tick == self._script.ticks:
            return
        if self._script.churns_at(tick) and not self._script.bursts_at(tick):
            come, self._away = self._away, self._victims(self._script.churn)
            self._change(tick, "churn", self._away, come)
        if self._script.bursts_at(tick):
            self._change(tick, "burst", self._victims(self._script.burst), [])

    def _victims(self, part: float) -> list[int]:
        """Draw holders, but never a stage's last one."""
        holders = [i for i in self._network.holders if i in self._alive]
        room = [0] * (self._network.num_stages + 1)
        for i in holders:
            room[self._network.stages[i]] += 1
        victims: list[int] = []
        for i in self._rng.sample(holders, len(holders)):
            if len(victims) < round(part * len(holders)) and room[self._network.stages[i]] > 1:
                room[self._network.stages[i]] -= 1
                victims.append(i)
        return sorted(victims)

    def _change(self, tick: int, kind: str, gone: list[int], come: list[int]) -> None:
        self._alive = (self._alive - set(gone)) | set(come)
        self._router.change(gone, come)
        self._best = optimum(self._network, self._alive)
        self._changes.append((tick, kind, len(gone), len(come), self._best))

    def _recoveries(self) -> Iterator[Change]:
        """Look up, for each change, when the flow was whole again before the next one."""
        ends = [*(tick for tick, *_ in self._changes), self._trial.last.tick][1:]
        for (tick, kind, gone, come, best), end in zip(self._changes, ends, strict=True):
            known = tick + self._detect_ticks
            later = (p for p in self._trial.points if tick < p.tick <= end and p.is_full)
            full = next((p.tick for p in later if p.tick >= known), None)
            recovered = None if full is None else max(0, round(full - known))
            yield Change(tick, kind, gone, come, best, recovered)
