"""The law's tolerances tell right from wrong: the swarm's arithmetic passes, each mutant fails.

The arithmetic is that of the real stages and of exact averaging, run in this process. Two data
nodes and two holders per stage take unequal shares, as in a real swarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from reference.law import LawBroken, assert_equal_outcomes
from reference.loop import LoggedStep, Outcome, run
from reference.recipe import Text, initial_weights
from reference.sample import sample_documents

from protocol.averaging.exact import ExactReduce
from protocol.averaging.port import Round
from protocol.keys import NodeKey
from protocol.manifest import (
    DataSpec,
    Manifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    TrainingSpec,
)
from stages import TorchBlockStage, TorchEdgeStage
from stages.data import Corpus
from stages.state import TorchStageState
from stages.tokenizer import ByteTokenizer

STEPS, QUOTA = 20, 8
MUTANT_STEPS, MUTATED_STEP, MUTATED_SLOT = 8, 2, 3
PEERS = sorted(NodeKey(bytes([k]) * 32).peer_id for k in range(1, 3))
Parts = list[tuple[torch.Tensor, int]]


def manifest_of(steps: int = STEPS, **training: object) -> Manifest:
    """A small swarm: 6 layers in 3 stages, grouped queries, clipping in force."""
    return Manifest(
        name="law",
        organiser=PEERS[0],
        model=ModelSpec(
            layers=6, width=32, heads=4, kv_heads=2, feed_forward=64, vocabulary=257, context=32
        ),
        pipeline=PipelineSpec(stages=3),
        training=TrainingSpec(
            steps=steps, quota=QUOTA, microbatch=2, clip_norm=1.0, seed=5, **training
        ),
        data=DataSpec(seed=9),
    )


def exact_sum(parts: Parts, step: int, stage: int) -> list[tuple[torch.Tensor, int]]:
    """What each holder has after exact averaging: the sum and the count."""
    round_ = Round(step=step, term=0, epoch=0, stage=stage, members=tuple(PEERS[: len(parts)]))
    rules = [
        ExactReduce(round_, peer, (gradient,), count, len(gradient))
        for peer, (gradient, count) in zip(round_.members, parts, strict=True)
    ]
    for rule in rules:
        for other in rules:
            if other is not rule:
                (part,) = rule.parts_of(other.index)
                other.on_part(rule.index, part, rule.num_microbatches)
    shards = [rule.reduced() for rule in rules]
    for rule in rules:
        for index, shard in enumerate(shards):
            rule.on_result(index, shard)
    return [(rule.complete(), rules[0].total_count) for rule in rules]


@dataclass
class Mutant:
    """What goes wrong, if anything."""

    commits: Callable[[int, int, int], int] = lambda step, slot, stage: 1
    average: Callable[[Parts, int, int], list[tuple[torch.Tensor, int]]] = exact_sum


@dataclass
class Chain:
    """A swarm without its network: 2 data nodes, 2 holders per stage."""

    manifest: Manifest
    mutant: Mutant
    outcome: Outcome = field(default_factory=Outcome)

    def __post_init__(self) -> None:
        corpus = Corpus(sample_documents(), ByteTokenizer(257), self.manifest)
        self.data_nodes = [TorchEdgeStage(self.manifest, corpus) for _ in PEERS]
        self.stages = [
            [TorchBlockStage(self.manifest, stage) for _ in PEERS]
            for stage in range(1, self.manifest.num_stages + 1)
        ]

    def train(self) -> Outcome:
        """Run all steps; the outcome has the weights of the first replica of each stage."""
        for step in range(self.manifest.training.steps):
            losses = [self.microbatch(step, slot) for slot in range(QUOTA)]
            self.outcome.losses[step] = math.fsum(losses) / len(losses)
            for stage, replicas in enumerate([self.data_nodes, *self.stages]):
                self.update(step, stage, replicas)
        for replicas in [self.data_nodes, *self.stages]:
            self.outcome.weights.update(replicas[0].named_weights())
        return self.outcome

    def microbatch(self, step: int, slot: int) -> float:
        """One flow along holders that depend on the slot, committed at once."""
        edge = self.data_nodes[slot % 2]
        path = [replicas[(slot + k) % 3 == 0] for k, replicas in enumerate(self.stages)]
        loss = 0.0
        tries = max(1, *(self.times(step, slot, k) for k in range(len(path) + 1)))
        for attempt in range(tries):
            key = (step, slot, attempt)
            hidden = edge.embed(key, step, slot)
            for holder in path:
                hidden = holder.forward(key, hidden, keep=True)
            loss, gradient = edge.loss_and_gradient(key, hidden)
            for holder in reversed(path):
                gradient = holder.backward(key, gradient)
            edge.embed_backward(key, gradient)
            for stage, owner in enumerate([edge, *path]):
                if attempt < self.times(step, slot, stage):
                    owner.commit(key, slot % 2)
                else:
                    owner.discard(key)
        return loss

    def times(self, step: int, slot: int, stage: int) -> int:
        """How often a microbatch counts in a stage: once, unless the mutant says otherwise."""
        return self.mutant.commits(step, slot, stage)

    def update(self, step: int, stage: int, replicas: list[TorchStageState]) -> None:
        """Average over the replicas and step each of them; they must stay bit-identical."""
        counts = [0, 0]
        for slot in range(QUOTA):
            owner = slot % 2 if stage == 0 else int((slot + stage - 1) % 3 == 0)
            counts[owner] += self.times(step, slot, stage)
        parts = [(r.gradient((0, 1)), n) for r, n in zip(replicas, counts, strict=True)]
        sums = self.mutant.average(parts, step, stage)
        digests = {
            replica.prepare(gradient, count)
            for replica, (gradient, count) in zip(replicas, sums, strict=True)
        }
        assert len(digests) == 1
        for replica in replicas:
            replica.apply()


def changed(times: int, stages: range) -> Callable[[int, int, int], int]:
    """One microbatch of one step counts ``times`` in some stages."""

    def commits(step: int, slot: int, stage: int) -> int:
        is_changed = (step, slot) == (MUTATED_STEP, MUTATED_SLOT) and stage in stages
        return times if is_changed else 1

    return commits


def unweighted(parts: Parts, step: int, stage: int) -> Parts:
    """The mean of the holders' means, whatever number of microbatches each had."""
    means = [(gradient / count, 1) for gradient, count in parts]
    return exact_sum(means, step, stage)


def rounded(parts: Parts, step: int, stage: int) -> Parts:
    """Averaging in bfloat16."""
    return exact_sum([(g.bfloat16().float(), count) for g, count in parts], step, stage)


ALL, ONE = range(4), range(2, 3)
MUTANTS = {
    "lost": Mutant(changed(0, ALL)),
    "lost_in_one_stage": Mutant(changed(0, ONE)),
    "duplicated": Mutant(changed(2, ALL)),
    "duplicated_in_one_stage": Mutant(changed(2, ONE)),
    "unweighted": Mutant(average=unweighted),
    "averaged_in_bfloat16": Mutant(average=rounded),
}


def reference_of(manifest: Manifest) -> Outcome:
    """The independent loop over the same quota of the same text."""
    plain = manifest.model_dump(mode="json")
    text = Text(plain, sample_documents())
    slots = tuple((PEERS[slot % 2], slot) for slot in range(QUOTA))
    log = [LoggedStep(step, slots) for step in range(manifest.training.steps)]
    return run(plain, initial_weights(plain), log, text.draw)


def test_adamw_keeps_the_law() -> None:
    manifest = manifest_of()
    reference = reference_of(manifest)
    assert reference.losses[STEPS - 1] < reference.losses[0] - 0.05  # it did train
    assert_equal_outcomes(Chain(manifest, Mutant()).train(), reference)


def test_sgd_keeps_the_law() -> None:
    manifest = manifest_of(optimizer=OptimizerSpec(name="sgd", learning_rate=0.1))
    assert_equal_outcomes(Chain(manifest, Mutant()).train(), reference_of(manifest))


@pytest.fixture(scope="module")
def short() -> tuple[Manifest, Outcome]:
    """Fewer steps than the law's, in which a mutant must already show."""
    manifest = manifest_of(steps=MUTANT_STEPS)
    return manifest, reference_of(manifest)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_breaks_the_law(name: str, short: tuple[Manifest, Outcome]) -> None:
    manifest, reference = short
    outcome = Chain(manifest, MUTANTS[name]).train()
    with pytest.raises(LawBroken, match="differ by"):
        assert_equal_outcomes(outcome, reference)
