"""The simulator of training steps: times that a hand can add up, and what no run may break."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from protocol.simulation.routing.families import in_regions
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.training import POLICIES, FaultScript, Fleet, Workload, simulate
from protocol.simulation.training.machine import Kind
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
    flows, chance = (run_of(name).outcome.summary()["step_s"] for name in ("gwtf", "random"))
    assert flows["mean"] < chance["mean"]  # type: ignore[index]
