"""A simulated training run: steps one after the other, under a policy and a fault script."""

from __future__ import annotations

from collections import deque
from random import Random

from protocol.simulation.training.agenda import Agenda
from protocol.simulation.training.closing import Closing
from protocol.simulation.training.fleet import Fleet
from protocol.simulation.training.links import Links
from protocol.simulation.training.machine import Machine
from protocol.simulation.training.microbatch import Microbatch
from protocol.simulation.training.outcome import CrashEvent, Outcome
from protocol.simulation.training.passes import Passes
from protocol.simulation.training.policies.base import Policy
from protocol.simulation.training.recovery import Recoveries
from protocol.simulation.training.script import Crash, FaultScript

_ENDLESS_S = 1e6  # of virtual time: a run that is not done by then hangs


def simulate(fleet: Fleet, policy: Policy, script: FaultScript, seed: int = 0) -> Outcome:
    """Run all steps of the fleet's workload. The same arguments give the same trace."""
    run = TrainingRun(fleet, policy, script, seed)
    run.start()
    run.agenda.run(until=lambda: run.is_over, limit_s=_ENDLESS_S)
    run.outcome.is_complete = run.is_over
    run.outcome.counts["transfers"] = run.links.num_transfers
    return run.outcome


class TrainingRun:
    """The world of one run: machines, links, the step in progress. Implements ``World``."""

    def __init__(self, fleet: Fleet, policy: Policy, script: FaultScript, seed: int) -> None:
        self.fleet, self.policy, self.script = fleet, policy, script
        self.agenda = Agenda()
        self.rng = Random(f"{policy.name} {seed}")  # noqa: S311 (a simulation)
        self.outcome = Outcome(policy.name)
        self.machines: dict[int, Machine] = {}
        self.links = Links(self.agenda, fleet, lambda n: self.machines[n].is_alive)
        self.step = -1
        self.is_over = False
        self.microbatches: list[Microbatch] = []
        self.pending: dict[int, deque[Microbatch]] = {}
        self.noticed: set[int] = set()
        self._in_flight: dict[int, int] = {}
        self._assigned: dict[int, int] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._crashes: deque[Crash] = deque()
        self._newcomer_sites: list[int] = []
        self.passes = Passes(self)
        self.recoveries = Recoveries(self)
        self.closing = Closing(self)

    # --- what a policy sees ------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """The number of stages that holders serve."""
        return self.fleet.network.num_stages

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the holders of a stage that nobody knows to be dead, in order."""
        return self._members[stage]

    def room(self, node: int) -> int:
        """Return how many more microbatches a holder could take."""
        return self.machines[node].capacity - self._assigned.get(node, 0)

    def stage_of(self, node: int) -> int:
        """Return the stage that a node serves."""
        return self.machines[node].stage

    def is_alive(self, node: int) -> bool:
        """Whether a node lives; before the first step all do."""
        return node not in self.machines or self.machines[node].is_alive

    def in_flight(self, data_node: int) -> int:
        """Return how many microbatches of a data node are under way."""
        return self._in_flight[data_node]

    def count_message(self) -> None:
        """Note that a small message was sent."""
        self.outcome.counts["messages"] += 1

    # --- beginning ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the first nodes; the first step opens when the policy is prepared."""
        network = self.fleet.network
        stages = {n: stage for n, stage in enumerate(network.stages) if stage}
        # The policy may look at the members while it settles their stages.
        self._members = _by_stage(stages, self.num_stages)
        stages = self.policy.attach(self, stages)
        self._members = _by_stage(stages, self.num_stages)
        for node, stage in sorted({**dict.fromkeys(network.data_nodes, 0), **stages}.items()):
            self._enter(node, stage)
        for data_node in network.data_nodes:
            self._in_flight[data_node] = 0
        for node in sorted(stages):
            self.policy.joined(node)
        self.agenda.after(self.policy.prepare_s(), self.open_step)

    def _enter(self, node: int, stage: int) -> None:
        machine = Machine(node, stage, self.fleet.capacity(node), self.agenda, self.outcome.spans)
        self.machines[node] = machine
        self.outcome.stages[node] = stage
        self.outcome.lives[node] = (self.agenda.now, float("inf"))

    # --- steps -------------------------------------------------------------------------------

    def open_step(self) -> None:
        """Begin the next step, with the newcomers, or end the run."""
        self.step += 1
        if self.step == self.fleet.workload.steps:
            self.is_over = True
            return
        self._let_in()
        self.policy.opens()
        for machine in self.machines.values():
            machine.step = self.step
        self._crashes = deque(self.script.of_step(self.step))
        self.closing.begin(self.agenda.now)
        self._deal()
        self.agenda.after(self.policy.opening_s(), self.issue)

    def _let_in(self) -> None:
        for site in self._newcomer_sites:
            node = next(n for n in range(site, 1 << 30, self.fleet.num_sites)
                        if n not in self.machines)  # fmt: skip
            stage = self.policy.choose_stage(node)
            self._enter(node, stage)
            self._members[stage] = (*self._members[stage], node)
            self.policy.joined(node)
        self._newcomer_sites = []

    def _deal(self) -> None:
        """Give each data node its part of the step's microbatches."""
        data_nodes, first = (
            self.fleet.network.data_nodes,
            self.step * self.fleet.workload.microbatches,
        )
        self.microbatches = [
            self._fresh(first + k, data_nodes[k % len(data_nodes)])
            for k in range(self.fleet.workload.microbatches)
        ]
        self.pending = {d: deque() for d in data_nodes}
        for microbatch in self.microbatches:
            self.pending[microbatch.data_node].append(microbatch)

    def _fresh(self, number: int, data_node: int) -> Microbatch:
        path: list[int | None] = [data_node, *[None] * self.num_stages, data_node]
        return Microbatch(number, data_node, path)

    def issue(self) -> None:
        """Let the data nodes start what the policy allows now."""
        for data_node, pending in self.pending.items():
            while pending and self.policy.may_start(data_node):
                microbatch = pending.popleft()
                self._in_flight[data_node] += 1
                self.policy.started(microbatch)
                self.passes.forward(microbatch, 1)

    # --- memory, as far as it is promised ----------------------------------------------------

    def assign(self, microbatch: Microbatch, stage: int, node: int) -> None:
        """Put a microbatch in a holder's hands, instead of whoever had it at that stage."""
        self.unassign(microbatch, stage)
        microbatch.path[stage] = node
        self._assigned[node] = self._assigned.get(node, 0) + 1

    def unassign(self, microbatch: Microbatch, stage: int) -> None:
        """Take it out of them."""
        node = microbatch.path[stage]
        if node is not None:
            self._assigned[node] -= 1
            microbatch.path[stage] = None

    def end(self, microbatch: Microbatch) -> None:
        """A microbatch is not under way any more; its holders learn it a latency later."""
        self._in_flight[microbatch.data_node] -= 1
        self.policy.ended(microbatch)
        self.free(microbatch)

    def free(self, microbatch: Microbatch) -> None:
        """Let all holders free its slot."""
        for stage in range(1, self.num_stages + 1):
            node = microbatch.path[stage]
            if node is not None:
                self._assigned[node] -= 1
                self.count_message()
                self._release_later(node, microbatch.data_node, microbatch.slot)

    def _release_later(self, node: int, data_node: int, slot: tuple[int, int]) -> None:
        delay_s = self.fleet.latency_s(data_node, node)
        self.agenda.after(delay_s, lambda: self.machines[node].release(slot))

    # --- faults ------------------------------------------------------------------------------

    def progressed(self, num_jobs: int) -> None:
        """The step has done so many jobs: let those die whose time has come."""
        total = 2 * self.num_stages * len(self.microbatches)
        while self._crashes and self._crashes[0].progress * total <= num_jobs:
            crash = self._crashes.popleft()
            self._newcomer_sites.append(crash.site)
            self.agenda.after(crash.delay_s, lambda site=crash.site: self._crash(site))  # type: ignore[misc]

    def _crash(self, site: int) -> None:
        machine = next(
            m for m in reversed(self.machines.values())
            if self.fleet.site(m.node) == site
        )  # fmt: skip
        others = [
            n for n in self._members[machine.stage]
            if n != machine.node and self.machines[n].is_alive
        ]  # fmt: skip
        if not others:
            # A stage without a holder would end the run for this policy and for no other.
            self.outcome.counts["spared"] += 1
            self._newcomer_sites.remove(site)
            return
        node, now = machine.node, self.agenda.now
        machine.crash()
        self.links.crash(node)
        self.outcome.crashes.append(CrashEvent(node, machine.stage, now))
        self.outcome.lives[node] = (self.outcome.lives[node][0], now)
        self.closing.crashed(machine.stage)
        self.agenda.after(self.fleet.workload.detect_s, lambda: self._notice(node))

    def _notice(self, node: int) -> None:
        self.noticed.add(node)
        stage = self.machines[node].stage
        self._members[stage] = tuple(n for n in self._members[stage] if n != node)
        self.policy.lost(node)
        self.recoveries.after_loss_of(node)
        self.issue()
        self.closing.check()


def _by_stage(stages: dict[int, int], num_stages: int) -> dict[int, tuple[int, ...]]:
    return {
        k: tuple(sorted(n for n, stage in stages.items() if stage == k))
        for k in range(1, num_stages + 1)
    }
