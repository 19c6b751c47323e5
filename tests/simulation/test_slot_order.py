"""A swarm that sums by slot makes the same bits whoever computes what, and whoever dies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from reference.sample import sample_documents
from simulated_swarms import manifest_of, plans_of

from protocol.manifest import ModelSpec, SignedManifest, sign
from protocol.simulation.cores import node_core
from protocol.simulation.faults import Fault
from protocol.simulation.host import simulation_key
from protocol.simulation.places import WORLD, over_the_world
from protocol.simulation.world import NodePlan, Result, Simulation
from stages import TorchBlockStage, TorchEdgeStage
from stages.data import Corpus
from stages.tokenizer import ByteTokenizer

STEPS = 3
KILLED = Fault("kill", 3, "after_commit", step=1, replace_after_s=2.0)


@dataclass(frozen=True)
class Run:
    """What must be the same bits, and by whom it was computed."""

    losses: tuple[float, ...]
    digests: tuple[tuple[str, ...], ...]  # of every stage at the start of every step
    paths: tuple[tuple[str, ...], ...]
    struck: tuple[Fault, ...]


@cache
def manifest(sums: Literal["arrival", "slots"]) -> SignedManifest:
    model = ModelSpec(
        layers=4, width=32, heads=4, kv_heads=2, feed_forward=64, vocabulary=257, context=32
    )
    signed = manifest_of(
        num_stages=2, steps=STEPS, quota=6, microbatch=2, model=model, optimizer="adamw"
    )
    training = signed.manifest.training.model_copy(update={"sums": sums})
    return sign(signed.manifest.model_copy(update={"training": training}), simulation_key(0))


def outcome_of(result: Result) -> Run:
    assert result.is_finished
    reports = result.nodes[0].journal.reports
    digests = {decision.step: decision.digests for decision in result.decisions}
    return Run(
        losses=tuple(report.loss for report in reports),
        digests=tuple(digests[step] for step in sorted(digests)),
        paths=tuple(e.path for report in reports for e in report.entries),
        struck=tuple(result.struck),
    )


def train(
    plans: tuple[NodePlan, ...],
    sums: Literal["arrival", "slots"] = "slots",
    faults: tuple[Fault, ...] = (),
    seed: int = 0,
) -> Run:
    signed = manifest(sums)
    corpus = Corpus(sample_documents(), ByteTokenizer(257), signed.manifest)

    def make(stage: int) -> TorchBlockStage | TorchEdgeStage:
        if stage:
            return TorchBlockStage(signed.manifest, stage)
        return TorchEdgeStage(signed.manifest, corpus)

    simulation = Simulation(
        signed, plans, build=node_core, stages=make, faults=faults, seed=seed,
        profile=over_the_world,
    )  # fmt: skip
    return outcome_of(simulation.run(limit_s=600))


def placed(first_place: int, holders: int, data_nodes: int = 1) -> tuple[NodePlan, ...]:
    return tuple(
        NodePlan(plan.stage, place=WORLD[(first_place + index) % len(WORLD)])
        for index, plan in enumerate(plans_of(data_nodes, 2, holders))
    )


def test_other_holders_other_delays_and_a_death_change_no_bit() -> None:
    alone = train(placed(0, holders=1))
    others = [
        train(placed(3, holders=3), seed=1),
        train(placed(1, holders=2, data_nodes=2), seed=2),
        train(placed(0, holders=2), faults=(KILLED,), seed=3),
    ]
    assert others[-1].struck == (KILLED,)
    for run in others:
        assert run.paths != alone.paths  # others computed it
        assert run.losses == alone.losses
        assert run.digests == alone.digests
    assert len(set(alone.digests)) == STEPS + 1


def test_sums_in_the_order_of_arrival_differ_in_their_bits() -> None:
    """Else the test above would prove nothing."""
    first, second = (train(placed(k, holders=2 + k), "arrival", seed=k) for k in (0, 1))
    assert first.digests[0] == second.digests[0]
    assert first.digests[-1] != second.digests[-1]
