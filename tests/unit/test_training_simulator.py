"""The simulator of training steps: times that a hand can add up, and what no run may break."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from protocol.errors import ConfigError
from protocol.simulation.routing.families import in_regions, of_size
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.training import (
    POLICIES,
    FaultScript,
    Fleet,
    Workload,
    simulate,
    with_compute,
)
from protocol.simulation.training.agenda import Agenda
from protocol.simulation.training.machine import Job, Kind, Machine, Purpose
from protocol.simulation.training.run import TrainingRun

CALM = FaultScript(())
SMALL = replace(Workload(), steps=3, microbatches=16)
NETWORK = in_regions(19, 4, seed=2)
HOLDERS = [n for n in range(NETWORK.num_nodes) if n not in NETWORK.data_nodes]


def line_of(stages: int, *, demand: int, capacity: int = 2) -> RoutingNetwork:
    """A data node and one holder per stage; every trip takes 0.05 s and 0.1 s of the links."""
    size = stages + 1
    return RoutingNetwork(
        names=tuple(f"n{k}" for k in range(size)),
        stages=tuple(range(size)),
        capacities=(0, *[capacity] * stages),
        demands=(demand, *[0] * stages),
        compute_s=(0.4, *[0.3] * stages),
        latency_s=np.full((size, size), 0.05),
        bandwidth_bytes_s=np.full((size, size), 1e7),
        payload_bytes=1e6,
    )


def run_of(name: str, churn: float = 0.0, seed: int = 1) -> TrainingRun:
    script = FaultScript.draw(HOLDERS, SMALL.steps, churn, seed)
    run = TrainingRun(Fleet(NETWORK, SMALL), POLICIES[name](), script, seed)
    run.start()
    run.agenda.run(until=lambda: run.is_over, limit_s=1e5)
    assert run.is_over
    return run


@pytest.mark.parametrize(
    ("stages", "microbatches", "capacity", "seconds"),
    [
        # Four trips of 0.15, forward 0.2, loss 0.1, backward 0.4; then 0.5 to update, 0.1 to agree.
        (1, 1, 2, 4 * 0.15 + 0.2 + 0.1 + 0.4 + 0.6),
        (2, 1, 2, 6 * 0.15 + 2 * (0.2 + 0.4) + 0.1 + 0.6),
        # The second waits for the first one's backward pass (0.75 to 1.15), then has its own.
        (1, 2, 2, 1.15 + 0.4 + 0.15 + 0.6),
        # With room for one, it waits for the first one's release, 0.05 after its commit at 1.3.
        (1, 2, 1, 1.35 + 0.2 + 0.15 + 0.1 + 0.15 + 0.4 + 0.15 + 0.6),
    ],
)
def test_makespans_that_a_hand_can_add_up(
    stages: int, microbatches: int, capacity: int, seconds: float
) -> None:
    workload = replace(Workload(), steps=2, microbatches=microbatches)
    fleet = Fleet(line_of(stages, demand=2, capacity=capacity), workload)
    outcome = simulate(fleet, POLICIES["greedy"](), CALM)
    assert outcome.seconds == pytest.approx([seconds, seconds])


@pytest.mark.parametrize("name", POLICIES)
def test_every_microbatch_counts_once_and_memory_returns_to_zero(name: str) -> None:
    run = run_of(name, churn=0.2)
    useful = Counter((s.step, s.stage, s.kind) for s in run.outcome.spans if s.is_useful)
    stages = range(1, NETWORK.num_stages + 1)
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    assert {useful[t, k, kind] for t in range(3) for k in stages for kind in kinds} == {16}
    assert run.outcome.microbatches == 3 * 16
    living = [machine for machine in run.machines.values() if machine.is_alive]
    assert not any(machine.held for machine in living)
    assert all(machine.most_held <= machine.capacity + 2 for machine in living)


@pytest.mark.parametrize("name", POLICIES)
def test_no_node_computes_two_jobs_at_once_nor_when_it_is_dead(name: str) -> None:
    outcome = run_of(name, churn=0.2).outcome
    for node, (born_s, died_s) in outcome.lives.items():
        mine = sorted((s.start_s, s.end_s) for s in outcome.spans if s.node == node)
        assert all(end_s <= start_s for (_, end_s), (start_s, _) in pairwise(mine))
        assert all(born_s <= start_s and end_s <= died_s for start_s, end_s in mine)


@pytest.mark.parametrize("name", POLICIES)
def test_without_churn_nothing_is_in_vain_and_backward_mirrors_forward(name: str) -> None:
    outcome = run_of(name).outcome
    assert outcome.wasted_s == 0
    paths: dict[Kind, set[tuple[int, int, int]]] = {kind: set() for kind in Kind}
    for span in outcome.spans:
        paths[span.kind].add((span.microbatch, span.stage, span.node))
    assert paths[Kind.FORWARD] == paths[Kind.BACKWARD]


def test_all_policies_suffer_the_same_crashes() -> None:
    outcomes = [run_of(name, churn=0.2).outcome for name in POLICIES]
    assert {len(o.crashes) + o.counts["spared"] for o in outcomes} == {3 * round(0.2 * 18)}


@pytest.mark.parametrize("name", ["gwtf", "swarm", "random"])
def test_equal_seeds_give_equal_runs(name: str) -> None:
    first, second = (run_of(name, churn=0.2).outcome for _ in range(2))
    assert first.summary() == second.summary()
    assert [(s.node, s.start_s) for s in first.spans] == [(s.node, s.start_s) for s in second.spans]
    assert first.summary() != run_of(name, churn=0.2, seed=9).outcome.summary()


def test_flows_take_less_time_than_chance() -> None:
    fleet = Fleet(in_regions(19, 4, seed=5), SMALL)
    flows, chance = (simulate(fleet, POLICIES[name](), CALM, 1) for name in ("gwtf", "random"))
    assert sum(flows.seconds) < sum(chance.seconds)


def test_an_activation_without_room_stays_with_its_sender() -> None:
    run = run_of("gwtf", churn=0.2)
    assert run.outcome.counts["refusals"] > 0
    assert not any(m._inboxes[Purpose.TRAIN] for m in run.machines.values())


def test_inexact_steps_end_without_what_died_in_a_sum() -> None:
    exact = run_of("swarm", churn=0.2).outcome
    fleet = Fleet(NETWORK, replace(SMALL, is_exact=False))
    script = FaultScript.draw(HOLDERS, SMALL.steps, 0.2, 1)
    inexact = simulate(fleet, POLICIES["swarm"](), script, 1)
    assert inexact.is_complete and inexact.counts["lost_sums"] > 0
    assert inexact.microbatches == exact.microbatches
    assert sum(inexact.seconds) < sum(exact.seconds)


def test_what_somebody_waits_for_goes_before_lost_sums() -> None:
    agenda, done = Agenda(), []
    machine = Machine(1, 1, 1, agenda, [])
    for number, purpose in enumerate((Purpose.TRAIN, Purpose.LOST_SUM, Purpose.REPAIR)):
        job = Job(Kind.FORWARD, (number, 0), 1.0, lambda span: done.append(span.microbatch),
                  lambda: False, purpose)  # fmt: skip
        machine.admit(job)
    assert len(machine.held) == 3 and not machine.has_room
    agenda.run(lambda: False, 10.0)
    assert done == [0, 2, 1]


def test_a_network_without_compute_seconds_is_refused_until_it_has_some() -> None:
    bare = of_size(9, 2).network(1)
    with pytest.raises(ConfigError, match="computes in no time"):
        Fleet(bare, SMALL)
    assert set(with_compute(bare, 1).compute_s) <= {0.2, 0.4, 0.8}
    assert Fleet(with_compute(bare, 1), SMALL)
