"""The toy model's stages equal its reference, and both notice what must not happen."""

from __future__ import annotations

import pytest
import torch

from protocol.errors import ProtocolViolation, StateMismatch
from protocol.keys import NodeKey
from protocol.manifest import Manifest, ModelSpec, PipelineSpec, TrainingSpec
from protocol.messages import Backward, ReducePart
from protocol.simulation import toy_math
from protocol.simulation.checks import (
    LawBrokenError,
    check_exactly_once,
    check_law,
    check_one_history,
)
from protocol.simulation.cost_model import CostModel, CostModelStage
from protocol.simulation.counted_stage import with_slot
from protocol.simulation.toy_reference import run_reference
from protocol.simulation.toy_stage import ToyBlockStage, toy_stage
from protocol.simulation.watch import Moved

QUOTA = 6
MANIFEST = Manifest(
    name="toy",
    organiser=NodeKey(bytes(32)).peer_id,
    model=ModelSpec(
        layers=2, width=4, heads=1, kv_heads=1, feed_forward=4, vocabulary=256, context=2
    ),
    pipeline=PipelineSpec(stages=2),
    training=TrainingSpec(steps=3, quota=QUOTA, microbatch=2),
)


def drive(stages: list, step: int, slot: int) -> float:
    """Take one microbatch through all stages and commit it."""
    key = (step, slot)
    edge, *blocks = stages
    h = edge.embed(key, step, slot)
    for block in blocks:
        h = block.forward(key, h, keep=True)
    loss, g = edge.loss_and_gradient(key, h)
    for block in reversed(blocks):
        g = block.backward(key, g)
    edge.embed_backward(key, g)
    for stage in stages:
        stage.commit(key, "all")
    return loss


def train(slots_of_step: list[list[int]], report) -> list[dict[int, float]]:
    """Train in one process with the stages; ``report`` gets each stage after each step."""
    stages = [toy_stage(MANIFEST, k) for k in range(3)]
    losses = []
    for step, slots in enumerate(slots_of_step):
        losses.append({slot: drive(stages, step, slot) for slot in slots})
        for stage in stages:
            stage.prepare(stage.gradient(["all"]), len(slots))
            stage.apply()
            report(stage, len(slots))
    return losses


def moves_of(slots_of_step: list[list[int]]) -> list[Moved]:
    moves: list[Moved] = []

    def report(stage, count: int) -> None:
        moves.append(
            Moved(0.0, "n", "apply", stage.stage, stage.step, stage.digest, stage.counts, count)
        )

    train(slots_of_step, report)
    return moves


def test_stages_equal_the_reference_bit_for_bit_in_any_order() -> None:
    losses = train([[3, 0, 5, 1, 4, 2], [2, 0], [1, 2, 3]], lambda *_: None)
    reference = run_reference(MANIFEST, [range(6), {0, 2}, {1, 2, 3}])
    assert losses == [step.losses for step in reference]
    moves = moves_of([[3, 0, 5, 1, 4, 2], [2, 0], [1, 2, 3]])
    assert [m.digest for m in moves] == [d for step in reference for d in step.digests]
    assert check_law(MANIFEST, moves) == 3


def test_the_toy_model_learns() -> None:
    reference = run_reference(MANIFEST, [range(QUOTA)] * 200)
    first, last = (sum(s.losses.values()) for s in (reference[0], reference[-1]))
    assert last < 0.7 * first


def test_gradients_are_those_of_autograd() -> None:
    weights = toy_math.initial_weights(MANIFEST, 1).requires_grad_()
    x = torch.rand(2, 2, 3, dtype=torch.float64, requires_grad=True)
    g = torch.rand(2, 2, 3, dtype=torch.float64)
    toy_math.block_forward(weights, x).backward(g)
    by_x, by_weights = toy_math.block_backward(weights.detach(), x.detach(), g)
    torch.testing.assert_close(by_x, x.grad)
    torch.testing.assert_close(by_weights, weights.grad)


@pytest.mark.parametrize(
    ("slots", "complaint"),
    [([0, 0, 1], "counted 2 times"), ([0, 1], "the mean was over")],
)
def test_a_duplicated_and_an_unweighted_microbatch_are_found(slots, complaint) -> None:
    stage = ToyBlockStage(MANIFEST, 1)
    for attempt, slot in enumerate(slots):
        h = with_slot(torch.ones(2, 2, 3), slot)
        stage.forward(attempt, h, keep=True)
        stage.backward(attempt, h)
        stage.commit(attempt, "all")
    stage.prepare(stage.gradient(["all"]), 3)
    stage.apply()
    moved = Moved(0.0, "n", "apply", 1, 1, stage.digest, stage.counts, 3)
    with pytest.raises(LawBrokenError, match=complaint):
        check_exactly_once([moved])


def test_a_microbatch_lost_on_one_stage_and_two_sides_are_found() -> None:
    whole, short = moves_of([[0, 1, 2]]), moves_of([[0, 1]])
    with pytest.raises(LawBrokenError, match="other slots"):
        check_exactly_once([whole[0], short[1]])
    with pytest.raises(LawBrokenError, match="two sides"):
        check_one_history([whole[0], short[0]])


def test_wrong_weights_break_the_law() -> None:
    moves = moves_of([[0, 1, 2]])
    first = moves[0]
    wrong = Moved(0.0, "n", "apply", 0, 1, "0" * 64, first.counts, 3)
    with pytest.raises(LawBrokenError, match="one computer"):
        check_law(MANIFEST, [wrong, *moves[1:]])


def test_an_activation_of_another_microbatch_is_found() -> None:
    stage = ToyBlockStage(MANIFEST, 1)
    stage.forward("k", with_slot(torch.ones(2, 2, 3), 1), keep=True)
    with pytest.raises(AssertionError, match="another microbatch"):
        stage.backward("k", with_slot(torch.ones(2, 2, 3), 2))


@pytest.mark.parametrize("make", [toy_stage, CostModelStage])
def test_state_travels_and_a_wrong_byte_is_found(make) -> None:
    stages = [make(MANIFEST, k) for k in range(3)]
    drive(stages, 0, 4)
    giver, taker = stages[1], make(MANIFEST, 1)
    giver.prepare(giver.gradient(["all"]), 1)
    giver.apply()
    data = giver.export_state()
    taker.import_state(data, giver.digest)
    assert (taker.step, taker.digest) == (1, giver.digest)
    assert torch.equal(taker.export_state(), data)
    data[-1] += 1
    with pytest.raises(StateMismatch):
        taker.import_state(data, giver.digest)


def test_abandon_and_reset_leave_the_state_as_it_was() -> None:
    stages = [toy_stage(MANIFEST, k) for k in range(3)]
    before = stages[1].digest
    drive(stages, 0, 0)
    stages[1].prepare(stages[1].gradient(["all"]), 1)
    stages[1].abandon()
    with pytest.raises(AssertionError):
        stages[1].apply()
    assert stages[1].gradient(["all"])[-QUOTA:].tolist() == [1, 0, 0, 0, 0, 0]
    stages[1].reset()
    assert not stages[1].gradient(["all"]).any()
    assert stages[1].digest == before
    with pytest.raises(KeyError):
        stages[1].commit((0, 0), "all")


def test_the_cost_model_weighs_the_real_tensors() -> None:
    costs = CostModel(MANIFEST, flops_per_s=1e6)
    seconds = costs.seconds()
    assert seconds["backward"] == 2 * seconds["forward"] > 0
    small = [torch.zeros(1, 1, 1)]
    peer = MANIFEST.organiser
    backward = Backward(step=0, data_node=peer, slot=0, attempt=0, stage=1, path=())
    assert costs.size_of(backward, small) == 2 * 2 * 4 * 4
    assert costs.size_of(backward, []) == 0
    part = ReducePart(step=0, term=0, stage=1, shard=0, num_microbatches=1)
    weights = 2 * 4 * (4 + 4) + 3 * 4 * 4
    assert costs.stage_weights == weights
    assert costs.size_of(part, [torch.zeros(QUOTA // 2)]) == weights * 4 // 2


@pytest.mark.parametrize("make", [toy_stage, CostModelStage])
def test_tokens_give_logits(make) -> None:
    edge, block = make(MANIFEST, 0), make(MANIFEST, 1)
    pins = [stage.pin(0, is_whole=False) for stage in (edge, block)]
    cache = block.open_cache(pins[1], 3)
    for num_tokens in (2, 1):
        tokens = torch.zeros(1, num_tokens, dtype=torch.long)
        h = block.extend(cache, edge.embed_tokens(pins[0], tokens))
    assert edge.logits(pins[0], h).shape == (1, 256)
    with pytest.raises(ProtocolViolation, match="more than 3"):
        block.extend(cache, h)
