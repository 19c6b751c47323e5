"""The harness: many node cores in one process, in virtual time, with faults and a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Protocol

import trio

from protocol.core.journal import MemoryJournal
from protocol.core.snapshots import MemorySnapshots
from protocol.deadlines import Deadlines
from protocol.errors import ShoalError
from protocol.joining import MigrationRules
from protocol.keys import NodeKey, PeerId
from protocol.manifest import SignedManifest
from protocol.messages import Decision, Message
from protocol.ports import BlockStage, EdgeStage, JobKind
from protocol.simulation.adapter import SimulatedNetwork
from protocol.simulation.disk import SimulatedSnapshots
from protocol.simulation.faults import Fault, FaultInjector, SimulatedFaultPoints
from protocol.simulation.host import FREE, VirtualHost, simulation_key
from protocol.simulation.network import VirtualNetwork
from protocol.simulation.places import LAB, Link, LinkProfile, Place, uniform
from protocol.simulation.registry import SimulatedRegistry, VirtualRegistry
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.session import SizeOf, tensor_bytes
from protocol.simulation.timeline import Timeline, run_virtual
from protocol.simulation.trace import Trace, TracingObserver
from protocol.simulation.watch import Moved, Witness

WALL_TIME_AT_START_S = 1.8e9
RETURNS_WITHIN_S = 3.0
NEARBY = uniform(Link(0.01))
StageFactory = Callable[[int], BlockStage | EdgeStage]


class Runnable(Protocol):
    """A node core, as far as the harness cares."""

    async def run(self) -> None:
        """Live until the training ends or the node is cancelled."""
        ...

    def drain(self) -> None:
        """Begin to leave."""
        ...

    async def save(self) -> None:
        """Write to disk what the node holds."""
        ...


@dataclass(frozen=True)
class NodePlan:
    """A node of the swarm: stage 0..S, or None to find one; ``joins_at_s`` virtual seconds.

    ``fits`` names the stages that it has room for and the microbatches that it can hold there.
    """

    stage: int | None
    place: Place = LAB
    capacity: int = 4
    speed: float = 1.0
    joins_at_s: float = 0.0
    fits: Mapping[int, int] | None = None


@dataclass
class SimulatedNode:
    """A node and its ports; ``index`` names its key."""

    index: int
    plan: NodePlan
    key: NodeKey
    host: VirtualHost
    network: SimulatedNetwork
    registry: SimulatedRegistry
    runner: VirtualRunner
    observer: TracingObserver
    faults: SimulatedFaultPoints
    journal: MemoryJournal
    rng: Random
    stage_factory: StageFactory
    snapshots: SimulatedSnapshots
    core: Runnable | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    failure: BaseException | None = None


@dataclass(frozen=True)
class Result:
    """What a run left behind."""

    is_finished: bool
    virtual_s: float
    trace: Trace
    moves: list[Moved]
    messages: Mapping[str, Sequence[Message]]
    nodes: Sequence[SimulatedNode]
    struck: Sequence[Fault]

    @property
    def decisions(self) -> list[Decision]:
        """Every decision that some node obeyed."""
        journals = {id(node.journal): node.journal for node in self.nodes}
        return [decision for journal in journals.values() for decision in journal.decisions]


class Simulation:
    """A world, described by its arguments; ``run`` plays it once.

    ``build`` makes a node's core from its ports. ``keep`` names the kinds of messages that the
    result collects, each as often as it was received.
    """

    def __init__(
        self,
        manifest: SignedManifest,
        plans: Sequence[NodePlan],
        *,
        build: Callable[[Simulation, SimulatedNode], Runnable],
        stages: StageFactory,
        seed: int = 0,
        profile: LinkProfile = NEARBY,
        deadlines: Deadlines | None = None,
        costs: Mapping[JobKind, float] = FREE,
        size_of: SizeOf = tensor_bytes,
        faults: Sequence[Fault] = (),
        keep: Sequence[str] = (),
        snapshot_steps: int = 0,
        snapshot_write_s: float = 0.0,
    ) -> None:
        self.manifest, self.deadlines = manifest, deadlines or Deadlines()
        self.trace, self.timeline = Trace(), Timeline()
        self.network = VirtualNetwork(
            self.timeline,
            self.trace,
            rng=self._random("network", seed),
            profile=profile,
            deadlines=self.deadlines,
            size_of=size_of,
        )
        self.registry = VirtualRegistry(self.wall_clock)
        self.migration = MigrationRules()
        self.nodes: list[SimulatedNode] = []
        self.injector = FaultInjector(faults, self._strike)
        self.witness = Witness(self.trace)
        self._plans, self._build, self._stages = plans, build, stages
        self._seed, self._costs = seed, costs
        self._messages: dict[str, list[Message]] = {kind: [] for kind in keep}
        self._journals: dict[PeerId, MemoryJournal] = {}
        self.snapshot_steps, self._snapshot_write_s = snapshot_steps, snapshot_write_s
        self._disks: dict[PeerId, MemorySnapshots] = {}
        self._next_index = len(plans)
        self._num_returning = 0
        self._ended = trio.Event()

    @staticmethod
    def _random(*names: object) -> Random:
        return Random(" ".join(map(str, names)))  # noqa: S311

    @staticmethod
    def wall_clock() -> float:
        """Return wall time in seconds: virtual time from a fixed start."""
        return WALL_TIME_AT_START_S + trio.current_time()

    # --- the run ---------------------------------------------------------------------------

    def run(self, limit_s: float = 600.0, settle_s: float = 1.0) -> Result:
        """Play until every stage holds the last state, or all nodes ended, or ``limit_s``.

        ``settle_s`` is how long it goes on after that, so that what is under way can be checked.
        """
        return run_virtual(partial(self._main, limit_s, settle_s), self._seed)

    async def _main(self, limit_s: float, settle_s: float) -> Result:
        await self._play(limit_s, settle_s)
        return Result(
            self._is_finished(),
            trio.current_time(),
            self.trace,
            self.witness.moves,
            self._messages,
            self.nodes,
            self.injector.struck,
        )

    async def _play(self, limit_s: float, settle_s: float) -> None:
        self.network.taps.append(self._collect)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.timeline.run)
            for index, plan in enumerate(self._plans):
                self.timeline.after(plan.joins_at_s, partial(self.spawn, index, plan))
            for fault in self.injector.timed():
                self.timeline.at(fault.at_s, partial(self.injector.fire, fault))
            with trio.move_on_after(limit_s):
                await self._ended.wait()
                await trio.sleep(settle_s)
            for node in self.nodes:
                node.host.die()
            nursery.cancel_scope.cancel()

    def _collect(self, _sender: VirtualHost, _receiver: VirtualHost, message: Message) -> None:
        if message.kind in self._messages:
            self._messages[message.kind].append(message)

    def _is_finished(self) -> bool:
        steps, stages = self.manifest.manifest.training.steps, self.manifest.manifest.num_stages
        return {m.stage for m in self.witness.moves if m.step >= steps} == set(range(stages + 1))

    def _moved(self) -> None:
        if self._is_finished():
            self._ended.set()

    # --- nodes -----------------------------------------------------------------------------

    def spawn(self, index: int, plan: NodePlan) -> None:
        """Start a node; with the index of a dead one it is that node, with what its disk kept."""
        node = self._assemble(index, plan)
        self.nodes.append(node)
        self.trace.add(node.host.name, "started")
        self._nursery.start_soon(self._live, node)

    def _assemble(self, index: int, plan: NodePlan) -> SimulatedNode:
        key = simulation_key(index)
        name, life = f"n{index}", sum(node.index == index for node in self.nodes)
        host = VirtualHost(name, key.peer_id, self.timeline, plan.place, self._costs, plan.speed)
        return SimulatedNode(
            index=index,
            plan=plan,
            key=key,
            host=host,
            network=self.network.attach(host),
            registry=self.registry.attach(host),
            runner=VirtualRunner(host),
            observer=TracingObserver(name, self.trace),
            faults=SimulatedFaultPoints(index, host, self.injector),
            journal=self._journals.setdefault(key.peer_id, MemoryJournal()),
            rng=self._random("node", self._seed, index, life),
            stage_factory=self.witness.watching(name, self._stages, self._moved),
            snapshots=SimulatedSnapshots(
                self._disks.setdefault(key.peer_id, MemorySnapshots(every=self.snapshot_steps)),
                host,
                self._snapshot_write_s,
            ),
        )

    async def _live(self, node: SimulatedNode) -> None:
        """Run a node until it ends or is killed. Boundary: a ShoalError ends this node alone."""
        with node.scope:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(node.network.run)
                    node.core = self._build(self, node)
                    try:
                        await node.core.run()
                    finally:
                        await self._end_cleanly(node, node.core)
                    nursery.cancel_scope.cancel()
            except* ShoalError as group:
                node.failure = group
                self.trace.add(node.host.name, "failed", str(group.exceptions[0]))
        node.host.die()
        if not self._num_returning and not any(other.host.is_alive for other in self.nodes):
            self._ended.set()

    async def _end_cleanly(self, node: SimulatedNode, core: Runnable) -> None:
        """A killed node has no time for anything."""
        with trio.move_on_after(self.deadlines.drain_s) as scope:
            scope.shield = node.host.is_alive
            await core.save()

    def kill(self, node: SimulatedNode) -> None:
        """End a node at once: its sessions break and nothing of it runs any more."""
        node.host.die()
        node.scope.cancel()

    def living(self, index: int) -> SimulatedNode | None:
        """Return the node with this index if it is alive."""
        found = (node for node in self.nodes if node.index == index and node.host.is_alive)
        return next(found, None)

    # --- faults ----------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        node = self.living(fault.node)
        self.trace.add(f"n{fault.node}", "struck", fault.action, str(fault.point), fault.step)
        if fault.action in ("cut_all", "stop_all"):
            self._restart_all(fault)
        if node is None:
            return
        match fault.action:
            case "kill":
                self._kill_and_replace(node, fault)
            case "freeze":
                node.host.freeze(fault.duration_s)
            case "slow":
                node.host.slow_down(fault.amount, fault.duration_s)
            case "duplicate":
                node.host.duplicate(fault.duration_s)
            case "delay":
                node.host.delay(fault.amount, fault.duration_s)
            case "partition":
                self._partition(node, fault)

    def _kill_and_replace(self, node: SimulatedNode, fault: Fault) -> None:
        self.kill(node)
        if fault.replace_after_s is not None:
            index = node.index
            if fault.is_stranger:
                index, self._next_index = self._next_index, self._next_index + 1
            self.timeline.after(fault.replace_after_s, partial(self._replace, index, node.plan))

    def _restart_all(self, fault: Fault) -> None:
        rng = self._random("restart", self._seed, fault.at_s)
        for node in [node for node in self.nodes if node.host.is_alive]:
            if fault.action == "cut_all":
                self.kill(node)
            else:
                self._nursery.start_soon(self._stop, node, fault.duration_s)
            back_s = (fault.replace_after_s or 0.0) + rng.uniform(0, RETURNS_WITHIN_S)
            self._num_returning += 1
            self.timeline.after(back_s, partial(self._return, node.index, node.plan))

    def _return(self, index: int, plan: NodePlan) -> None:
        self._num_returning -= 1
        self._replace(index, plan)

    async def _stop(self, node: SimulatedNode, patience_s: float) -> None:
        """Ask a node to leave, as its owner would, and insist after a while."""
        if node.core is not None:
            node.core.drain()
            await trio.sleep(patience_s)
        node.scope.cancel()

    def _replace(self, index: int, plan: NodePlan) -> None:
        if self.living(index) is None:
            self.spawn(index, plan)

    def _partition(self, node: SimulatedNode, fault: Fault) -> None:
        inside = [n.key.peer_id for n in self.nodes if n.index in (node.index, *fault.allies)]
        outside = [n.key.peer_id for n in self.nodes if n.key.peer_id not in inside]
        self.network.partition(inside, outside, fault.duration_s, is_one_way=fault.is_one_way)
