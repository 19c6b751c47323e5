"""Whole swarms in virtual time: big ones, far ones, and one with the real model."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from reference.law import assert_equal_outcomes
from reference.loop import LoggedStep, Outcome, run
from reference.recipe import Text, initial_weights
from reference.sample import sample_documents
from simulated_swarms import manifest_of, plans_of, toy_swarm

from protocol.manifest import ModelSpec, SignedManifest
from protocol.simulation.checks import (
    check_exactly_once,
    check_law,
    check_one_history,
    check_shares,
)
from protocol.simulation.cores import node_core
from protocol.simulation.cost_model import CostModel, CostModelStage
from protocol.simulation.places import WORLD, over_the_world
from protocol.simulation.world import NodePlan, Result, Simulation
from stages import TorchBlockStage, TorchEdgeStage
from stages.data import Corpus
from stages.tokenizer import ByteTokenizer


@pytest.mark.slow
def test_fifty_nodes_around_the_world() -> None:
    """2 data nodes and 4 stages x 12 holders of 1.9 million weights each, by cost."""
    model = ModelSpec(
        layers=8, width=256, heads=8, kv_heads=2, feed_forward=1024, vocabulary=512, context=256
    )
    signed = manifest_of(num_stages=4, steps=2, quota=16, min_holders=12, microbatch=2, model=model)
    costs = CostModel(signed.manifest)
    plans = tuple(
        NodePlan(plan.stage, place=WORLD[index % len(WORLD)])
        for index, plan in enumerate(plans_of(2, 4, 12))
    )
    result = Simulation(
        signed,
        plans,
        build=node_core,
        stages=partial(CostModelStage, signed.manifest),
        profile=over_the_world,
        costs=costs.seconds(),
        size_of=costs.size_of,
    ).run(limit_s=3600)
    assert result.is_finished
    assert len(result.nodes) == 50
    check_one_history(result.moves)
    committed = check_exactly_once(result.moves)
    check_shares(committed, result.decisions)
    assert [len(slots) for slots in committed] == [16, 16]
    # Time passes as the links say: one microbatch alone crosses the world ten times.
    assert result.virtual_s > 10 * 0.05


def test_a_quiet_swarm_loses_nothing_and_issues_nothing_twice() -> None:
    simulation = toy_swarm(steps=6, quota=8)
    result = simulation.run()
    assert result.is_finished
    assert check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"]) == 6
    assert sum(node.observer.counts["microbatches_reissued"] for node in result.nodes) == 0
    assert all(len(slots) == 8 for slots in check_exactly_once(result.moves))


def test_a_volunteer_finds_a_stage_and_joins_by_state_transfer() -> None:
    signed = manifest_of(steps=40)
    plans = (NodePlan(0), NodePlan(1), NodePlan(2), NodePlan(2), NodePlan(None, joins_at_s=1.5))
    simulation = toy_swarm(steps=40, plans=plans)
    assert simulation.manifest == signed
    result = simulation.run()
    check_law(signed.manifest, result.moves)
    mine = [(moved.how, moved.stage) for moved in result.moves if moved.node == "n4"]
    assert mine[:2] == [("start", 1), ("import", 1)]
    assert ("apply", 1) in mine


def trace_digest(seed: int) -> str:
    return toy_swarm(steps=2, seed=seed).run().trace.digest()


def test_the_same_seed_gives_the_same_trace() -> None:
    assert trace_digest(3) == trace_digest(3)
    assert trace_digest(3) != trace_digest(4)


def test_the_trace_does_not_depend_on_the_hash_seed() -> None:
    code = "import test_swarm; print(test_swarm.trace_digest(3))"
    here = Path(__file__).parent
    digests = set()
    for hash_seed in ("1", "2"):
        path = os.pathsep.join([str(here), str(here.parent), str(here.parents[1])])
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        run_ = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            check=True,
            text=True,
        )
        digests.add(run_.stdout.strip())
    assert len(digests) == 1


STEPS = 8


@pytest.fixture(scope="module")
def torch_manifest() -> SignedManifest:
    model = ModelSpec(
        layers=6, width=32, heads=4, kv_heads=2, feed_forward=64, vocabulary=257, context=32
    )
    return manifest_of(
        num_stages=3, steps=STEPS, quota=6, microbatch=2, model=model, optimizer="adamw"
    )


def torch_outcome(result: Result, made: list[TorchBlockStage | TorchEdgeStage]) -> Outcome:
    """The losses that the data node noted and the final weights of every stage."""
    reports = result.nodes[0].journal.reports
    outcome = Outcome(losses={report.step: report.loss for report in reports})
    for stage in made:
        if stage.step == STEPS:
            outcome.weights.update(stage.named_weights())
    return outcome


def test_seven_nodes_with_the_real_model_keep_the_law(torch_manifest: SignedManifest) -> None:
    manifest = torch_manifest.manifest
    corpus = Corpus(sample_documents(), ByteTokenizer(257), manifest)
    made: list[TorchBlockStage | TorchEdgeStage] = []

    def make(stage: int) -> TorchBlockStage | TorchEdgeStage:
        made.append(TorchBlockStage(manifest, stage) if stage else TorchEdgeStage(manifest, corpus))
        return made[-1]

    result = Simulation(torch_manifest, plans_of(1, 3, 2), build=node_core, stages=make).run()
    assert result.is_finished
    check_one_history(result.moves)
    log = [
        LoggedStep(report.step, tuple((e.data_node, e.slot) for e in report.entries))
        for report in result.nodes[0].journal.reports
    ]
    plain = manifest.model_dump(mode="json")
    reference = run(plain, initial_weights(plain), log, Text(plain, sample_documents()).draw)
    assert_equal_outcomes(torch_outcome(result, made), reference)
