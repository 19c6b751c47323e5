"""Rebuilding a stage from its neighbours' weights, and what a rebuilt state remembers."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from stages_kit import make_blocks, make_edge, make_manifest, normal, run_microbatch

from protocol.errors import NonFinite, StateMismatch
from protocol.manifest import learning_rate
from protocol.recovery import stage_order
from stages import TorchBlockStage
from stages.recovery import check_alike, merge, read_weights, rebuilt_weights
from stages.snapshot import Course

CHECKFREE = {"method": "checkfree"}
SCHEDULE = {"kind": "cosine", "warmup_steps": 4}


def manifest_of(method="checkfree", stages=4):
    recovery = {"recovery": {"method": method}} if method else {}
    made = make_manifest(pipeline={"stages": stages}, training={"schedule": SCHEDULE})
    return made.model_validate({**made.model_dump(mode="json"), **recovery})


MANIFEST = manifest_of()
FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = arrays(np.float32, 16, elements=FLOATS).map(torch.from_numpy)


def fetched(stage, manifest=MANIFEST):
    _, digest, pieces = stage.view_state()
    return read_weights(manifest, stage.stage, digest, pieces)


def train(stage, count=3, seed=0):
    for number in range(count):
        stage.prepare(normal(stage.num_gradients, seed=seed + number), 4)
        stage.apply()
    return stage


def bits(tensor):
    return tensor.view(torch.int32)


# --- merging ---------------------------------------------------------------------------------


@given(ROWS, ROWS, st.floats(0, 1))
def test_the_mean_lies_between_its_neighbours(below, above, t):
    mixed = merge(below, above, t)
    assert bool((mixed >= torch.minimum(below, above)).all())
    assert bool((mixed <= torch.maximum(below, above)).all())
    exact = below.double() + t * (above.double() - below.double())
    assert bool(((mixed - exact).abs() <= 1e-6 * (below.abs() + above.abs()) + 1e-30).all())


@given(ROWS, st.floats(0, 1))
@example(torch.tensor([-0.0, 0.0, 1.0]), 0.3)
def test_equal_neighbours_give_the_same_bits(row, t):
    assert torch.equal(bits(merge(row, row.clone(), t)), bits(row))


@given(ROWS, ROWS)
def test_the_whole_weight_gives_an_exact_copy(below, above):
    assert torch.equal(bits(merge(below, above, 0.0)), bits(below))
    assert torch.equal(bits(merge(below, above, 1.0)), bits(above))


def test_merging_changes_neither_neighbour():
    below, above = normal(9, seed=1), normal(9, seed=2)
    kept = below.clone(), above.clone()
    merge(below, above, 0.0).zero_()
    merge(below, above, 0.3).zero_()
    assert torch.equal(below, kept[0])
    assert torch.equal(above, kept[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_neighbour_that_is_not_finite_is_refused(bad):
    broken = torch.zeros(3)
    broken[1] = bad
    with pytest.raises(NonFinite):
        merge(torch.zeros(3), broken, 0.5)


def test_rows_of_other_lengths_are_refused():
    with pytest.raises(ValueError):
        merge(torch.zeros(3), torch.zeros(4), 0.5)


def test_a_stage_with_other_layers_is_refused():
    uneven = make_manifest(pipeline={"stages": [1, 2, 1]})
    check_alike(uneven, 1, 3)
    with pytest.raises(StateMismatch, match="has 1 layers"):
        check_alike(uneven, 1, 2)


def test_a_state_is_weights_in_fp32_and_nothing_else_that_could_be_mixed():
    stage = TorchBlockStage(MANIFEST, 2)
    weights = fetched(stage).weights
    assert weights.dtype == torch.float32
    assert len(weights) == sum(w.numel() for w in stage.named_weights().values())
    assert all("proj" in name for name in stage.named_weights())  # no rotary table, no mask


# --- reading weights in pieces ---------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6])
def test_weights_are_read_from_any_pieces(size):
    stage = train(TorchBlockStage(MANIFEST, 2))
    encoded = stage.export_state()
    pieces = torch.split(encoded, size) if size > 1 else [encoded]
    read = read_weights(MANIFEST, 2, stage.digest, pieces)
    assert (read.stage, read.step) == (2, 3)
    assert read.gradient_norm == stage.course.gradient_norm
    assert torch.equal(
        read.weights, torch.cat([w.flatten() for w in stage.named_weights().values()])
    )


def test_a_state_with_wrong_bytes_is_refused():
    stage = train(TorchBlockStage(MANIFEST, 2))
    for change in (lambda b: b[:-4], lambda b: torch.cat([b, b[:4]]), lambda b: b ^ (b == b[-1])):
        with pytest.raises(StateMismatch):
            read_weights(MANIFEST, 2, stage.digest, [change(stage.export_state())])
    longer = torch.cat([stage.export_state(), torch.zeros(4, dtype=torch.uint8)])
    for foreign in (stage.export_state()[:-4], longer):
        with pytest.raises(StateMismatch, match="bytes of numbers"):
            read_weights(MANIFEST, 2, sha256(foreign.numpy().data).hexdigest(), [foreign])
    with pytest.raises(StateMismatch):
        read_weights(MANIFEST, 3, stage.digest, [stage.export_state()])
    with pytest.raises(StateMismatch, match="claims"):
        read_weights(MANIFEST, 2, stage.digest, [torch.full((9,), 255, dtype=torch.uint8)])


def test_a_twin_is_copied_and_neighbours_of_two_steps_are_not_mixed():
    below, above = (train(TorchBlockStage(MANIFEST, k), count=k) for k in (1, 3))
    twin = fetched(below)
    assert torch.equal(bits(rebuilt_weights(MANIFEST, 2, [twin], 0.3)), bits(twin.weights))
    with pytest.raises(StateMismatch, match="different steps"):
        rebuilt_weights(MANIFEST, 2, [twin, fetched(above)], 0.3)


# --- the rebuilt stage -----------------------------------------------------------------------


def rebuilt_from_neighbours(manifest=MANIFEST, times=1):
    below, above = (train(TorchBlockStage(manifest, k), seed=k) for k in (1, 3))
    stage = train(TorchBlockStage(manifest, 2), seed=9)
    for _ in range(times):
        weights = merge(fetched(below, manifest).weights, fetched(above, manifest).weights, 0.25)
        stage.rebuild(weights, below.step, manifest.recovery.lr_scale)
    return stage, weights


def test_all_who_rebuild_come_to_the_same_bits():
    (one, _), (other, _) = rebuilt_from_neighbours(), rebuilt_from_neighbours()
    assert one.digest == other.digest
    assert torch.equal(one.export_state(), other.export_state())


def test_the_learning_rate_is_scaled_once_however_often_a_stage_is_rebuilt():
    stage, weights = rebuilt_from_neighbours(times=3)
    assert stage.course == Course(fresh_at=3, lr_scale=1.1)
    optimiser = torch.optim.AdamW([parameter := torch.nn.Parameter(weights.clone())], lr=1.0,
                                  betas=(0.9, 0.95), weight_decay=0.1)  # fmt: skip
    for number in range(3):
        gradient = normal(stage.num_gradients, seed=number)
        stage.prepare(gradient, 4)
        stage.apply()
        parameter.grad = gradient / 4
        # The schedule goes by the swarm's step, the moments by their own age.
        optimiser.param_groups[0]["lr"] = 1.1 * learning_rate(MANIFEST.training, 3 + number)
        optimiser.step()
        torch.testing.assert_close(fetched(stage).weights, parameter.data, rtol=1e-5, atol=1e-6)


def test_what_a_rebuilt_state_remembers_travels_and_counts():
    stage, weights = rebuilt_from_neighbours()
    other = TorchBlockStage(MANIFEST, 2)
    other.rebuild(weights, 3, 1.0)
    assert other.digest != stage.digest  # the scale is part of the state
    other.import_state(stage.export_state(), stage.digest)
    assert other.course == stage.course
    for replica in (stage, other):
        train(replica, seed=50)
    assert other.digest == stage.digest
    assert other.course == stage.course
    assert stage.course.lr_scale == 1.1
    assert stage.course.gradient_norm == pytest.approx(stage.gradient_norm)


def test_the_norm_belongs_to_the_state_and_not_to_the_one_in_preparation():
    stage = train(TorchBlockStage(MANIFEST, 2))
    before, digest = stage.course, stage.digest
    stage.prepare(normal(stage.num_gradients, seed=77) * 5, 4)
    assert stage.course == before
    assert stage.digest == digest
    _, prepared, pieces = stage.view_state(is_prepared=True)
    assert read_weights(MANIFEST, 2, prepared, pieces).gradient_norm > before.gradient_norm
    stage.abandon()
    assert train(stage, 1, seed=5).course.gradient_norm != before.gradient_norm


def test_others_optimisers_stay_as_they_were():
    below, above = (train(TorchBlockStage(MANIFEST, k), seed=k) for k in (1, 3))
    digests = below.digest, above.digest
    rebuilt_from_neighbours()
    merge(fetched(below).weights, fetched(above).weights, 0.5)
    assert (below.digest, above.digest) == digests


def test_an_older_state_of_its_own_keeps_its_moments_at_a_later_step():
    stage = train(TorchBlockStage(MANIFEST, 2))
    data = stage.export_state()
    stage.move_to(10)
    assert (stage.step, stage.course.fresh_at) == (10, 7)
    assert torch.equal(stage.export_state()[-4:], data[-4:])
    twin = TorchBlockStage(MANIFEST, 2)
    twin.import_state(data, train(TorchBlockStage(MANIFEST, 2)).digest)
    constant = TorchBlockStage(MANIFEST, 2)
    constant.import_state(stage.export_state(), stage.digest)
    assert constant.digest == stage.digest
    with pytest.raises(ValueError):
        stage.move_to(9)


def test_a_swarm_that_rebuilds_nothing_cannot_be_made_to():
    stage = TorchBlockStage(manifest_of(method=None), 2)
    assert stage.course is None
    with pytest.raises(ValueError):
        stage.rebuild(torch.zeros(stage.num_gradients), 0, 1.1)
    with pytest.raises(ValueError):
        stage.move_to(3)


# --- whole steps -----------------------------------------------------------------------------


def loop(manifest, steps=3):
    edge, blocks = make_edge(manifest), make_blocks(manifest)
    for step in range(steps):
        for slot in range(4):
            order = stage_order(manifest.recovery, manifest.num_stages, slot)
            run_microbatch(edge, [blocks[k - 1] for k in order], step, slot)
        for stage in (edge, *blocks):
            stage.prepare(stage.gradient(["d"]), 4)
            stage.apply()
    return [edge, *blocks]


def test_without_failures_checkfree_changes_no_bit():
    plain, checkfree = loop(manifest_of(method=None)), loop(MANIFEST)
    for one, other in zip(plain, checkfree, strict=True):
        for name, weight in one.named_weights().items():
            assert torch.equal(bits(weight), bits(other.named_weights()[name]))
        # What it costs: a number or two in the header.
        assert len(other.export_state()) - len(one.export_state()) < 120


def test_swapped_gradients_belong_to_the_stage_that_computed_them():
    """Against autograd over the same stages called in the swapped order."""
    manifest = manifest_of("checkfree_plus")
    edge, blocks = make_edge(manifest), make_blocks(manifest)
    order = stage_order(manifest.recovery, 4, 1)
    assert order == (2, 1, 4, 3)
    run_microbatch(edge, [blocks[k - 1] for k in order], 0, 1)
    h = edge.embed("reference", 0, 1)
    leaves = {k: blocks[k - 1]._current.leaves for k in order}
    with torch.enable_grad():
        for k in order:
            h = blocks[k - 1]._run(h)
        loss = edge._loss(h, edge._work["reference"])
        wanted = torch.autograd.grad(loss, [leaf for k in order for leaf in leaves[k]])
    wanted = iter(wanted)
    for k in order:
        expected = torch.cat([next(wanted).flatten() for _ in leaves[k]])
        torch.testing.assert_close(blocks[k - 1].gradient(["d"]), expected, rtol=1e-4, atol=1e-7)


def test_shared_embedding_and_head_are_the_same_to_the_bit():
    """Renewed at every step, the copy beside stage 0 is its state: the digest says so."""
    states = loop(MANIFEST)
    copy = states[0].export_state().clone()
    restored = make_edge(MANIFEST)
    restored.import_state(copy, states[0].digest)
    for name, weight in states[0].named_weights().items():
        assert torch.equal(bits(weight), bits(restored.named_weights()[name]))


# --- in a swarm ------------------------------------------------------------------------------


def test_a_lost_stage_is_made_of_what_its_neighbours_sent():
    blocks = [train(block, seed=10 * block.stage) for block in make_blocks(MANIFEST)]
    below, lost, above = blocks[1], blocks[2], blocks[3]
    parts = [lost.weights_of(b.stage, b.digest, b.export_state()) for b in (below, above)]
    assert [norm for _, norm in parts] == [b.course.gradient_norm for b in (below, above)]
    news = [TorchBlockStage(MANIFEST, 3) for _ in range(2)]
    for new in news:
        new.rebuild_from(parts[0][0], parts[1][0], 0.25, step=3, lr_scale=1.1)
    assert news[0].digest == news[1].digest
    names = zip(*(b.named_weights().values() for b in (below, above, news[0])), strict=True)
    for a, b, mean in names:
        assert torch.equal(mean, a + 0.25 * (b - a))
    assert (news[0].step, news[0].course) == (3, Course(fresh_at=3, lr_scale=1.1))


def test_bytes_of_another_digest_are_refused():
    below, _, above = make_blocks(MANIFEST)[1:]
    with pytest.raises(StateMismatch):
        above.weights_of(below.stage, above.digest, below.export_state())
