"""What the stages do with their parameters: gradient sums, optimisers, two-phase steps, state."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from safetensors.torch import load
from stages_kit import make_blocks, make_edge, make_manifest, normal, run_microbatch

from protocol.errors import ConfigError, NonFinite, StateMismatch
from protocol.manifest import learning_rate
from stages import TorchBlockStage
from stages.optimiser import make_optimiser

MANIFEST = make_manifest()


def make_stage(manifest=MANIFEST):
    return TorchBlockStage(manifest, 1)


def work(stage, key, seed=0):
    """Leave the weight gradient of one microbatch under ``key``."""
    stage.forward(key, normal(3, 12, 32, seed=seed), keep=True)
    stage.backward(key, normal(3, 12, 32, seed=seed + 100))


def step(stage, seed=0, count=4, size=1.0):
    gradient = normal(stage.num_gradients, seed=seed) * size
    stage.prepare(gradient, count)
    stage.apply()
    return gradient


def flat_weights(stage):
    return torch.cat([weight.flatten() for weight in stage.named_weights().values()])


# --- gradients -----------------------------------------------------------------------------


def test_sums_are_kept_per_group_and_added_in_order():
    stage = make_stage()
    parts = {}
    for key, group in enumerate(["a", "b", "a"]):
        work(stage, key, seed=key)
        lone = make_stage()
        work(lone, key, seed=key)
        lone.commit(key, "only")
        parts[key] = lone.gradient(["only"])
        stage.commit(key, group)
    assert torch.equal(stage.gradient(["a"]), parts[0] + parts[2])
    assert torch.equal(stage.gradient(["b", "a"]), parts[1] + (parts[0] + parts[2]))
    assert torch.equal(stage.gradient(["nobody", "b"]), parts[1])
    assert not stage.gradient(["nobody"]).any()


def test_a_gradient_counts_once():
    stage = make_stage()
    work(stage, "w")
    stage.commit("w", "a")
    with pytest.raises(KeyError):
        stage.commit("w", "a")


def test_discarded_work_is_gone():
    stage = make_stage()
    stage.forward("graph", normal(3, 12, 32), keep=True)
    work(stage, "gradient")
    assert stage.bytes_kept > 0
    for key in ("graph", "gradient", "never there"):
        stage.discard(key)
    assert stage.bytes_kept == 0
    with pytest.raises(KeyError):
        stage.backward("graph", normal(3, 12, 32))
    with pytest.raises(KeyError):
        stage.commit("gradient", "a")


def test_the_gradient_handed_out_does_not_change_later():
    stage = make_stage()
    work(stage, 0)
    stage.commit(0, "a")
    handed_out = stage.gradient(["a"])
    before = handed_out.clone()
    work(stage, 1)
    stage.commit(1, "a")
    step(stage)
    work(stage, 2)
    stage.commit(2, "a")
    assert torch.equal(handed_out, before)


def test_edge_sums_repeated_tokens():
    edge, blocks = make_edge(MANIFEST), make_blocks(MANIFEST)
    edge._source.draw = lambda _step, _slot: torch.full((3, 13), 9)
    run_microbatch(edge, blocks, 0, 0)
    embedding = edge._layout.named_views(edge.gradient(["d"]))["model.embed_tokens.weight"]
    assert embedding[9].any()
    assert not embedding[:9].any()
    assert not embedding[10:].any()


# --- optimisers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [
        (
            {"name": "adamw", "learning_rate": 0.01, "beta2": 0.95, "weight_decay": 0.1},
            lambda p: torch.optim.AdamW(p, lr=1.0, betas=(0.9, 0.95), weight_decay=0.1),
        ),
        (
            {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, weight_decay=0.01),
        ),
        (
            {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0},
            lambda p: torch.optim.SGD(p, lr=1.0),
        ),
    ],
    ids=["adamw", "sgd", "plain sgd"],
)
def test_optimiser_equals_torch(optimizer, reference):
    schedule = {"kind": "cosine", "warmup_steps": 2}
    manifest = make_manifest(training={"optimizer": optimizer, "schedule": schedule})
    stage = make_stage(manifest)
    parameter = torch.nn.Parameter(flat_weights(stage))
    torch_optimiser = reference([parameter])
    for count in range(6):
        gradient = step(stage, seed=count)
        parameter.grad = gradient / 4
        torch_optimiser.param_groups[0]["lr"] = learning_rate(manifest.training, count)
        torch_optimiser.step()
        torch.testing.assert_close(flat_weights(stage), parameter.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [100.0, 0.01], ids=["long", "short"])
def test_clipping_is_by_the_norm_of_the_average(size):
    optimizer = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    manifest = make_manifest(training={"optimizer": optimizer, "clip_norm": 2.0})
    stage = make_stage(manifest)
    before = flat_weights(stage)
    mean = step(stage, size=size) / 4
    norm = float(mean.double().norm())
    assert stage.gradient_norm == pytest.approx(norm, rel=1e-6)
    assert stage.update_norm == pytest.approx(min(norm, 2.0), rel=1e-4)
    expected = before - mean * min(1.0, 2.0 / (norm + 1e-6))
    torch.testing.assert_close(flat_weights(stage), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["muon", "axis_adamw"])
def test_other_optimisers_are_refused(name):
    spec = make_manifest(training={"optimizer": {"name": name}}).training.optimizer
    with pytest.raises(ConfigError, match=name) as caught:
        make_optimiser(spec)
    assert "adamw" in caught.value.hint


# --- two-phase steps -----------------------------------------------------------------------


def test_prepare_leaves_the_state_alone_until_apply():
    stage = make_stage()
    weights, digest = flat_weights(stage), stage.digest
    output = stage.forward("a", normal(3, 12, 32), keep=False)
    prepared = stage.prepare(normal(stage.num_gradients), 4)
    assert (stage.step, stage.digest) == (0, digest)
    assert torch.equal(flat_weights(stage), weights)
    assert torch.equal(stage.forward("b", normal(3, 12, 32), keep=False), output)
    stage.apply()
    assert (stage.step, stage.digest) == (1, prepared)
    assert not torch.equal(flat_weights(stage), weights)
    assert not torch.equal(stage.forward("c", normal(3, 12, 32), keep=False), output)


def test_apply_drops_all_gradients():
    stage = make_stage()
    work(stage, "pending")
    stage.forward("graph", normal(3, 12, 32), keep=True)
    work(stage, "committed")
    stage.commit("committed", "a")
    step(stage)
    assert not stage.gradient(["a"]).any()
    with pytest.raises(KeyError):
        stage.commit("pending", "a")
    with pytest.raises(KeyError):
        stage.backward("graph", normal(3, 12, 32))


def test_preparing_again_or_after_abandoning_gives_the_same():
    stage = make_stage()
    gradient = normal(stage.num_gradients)
    kept = gradient.clone()
    step(stage, seed=1)
    first = stage.prepare(gradient, 4)
    stage.prepare(normal(stage.num_gradients, seed=2), 3)
    stage.abandon()
    with pytest.raises(ValueError, match="nothing is prepared"):
        stage.apply()
    assert stage.prepare(gradient, 4) == first
    assert torch.equal(gradient, kept)


def test_abandon_keeps_gradients_and_reset_drops_them():
    stage = make_stage()
    work(stage, "committed")
    stage.commit("committed", "a")
    work(stage, "pending")
    stage.prepare(stage.gradient(["a"]), 1)
    stage.abandon()
    assert stage.gradient(["a"]).any()
    stage.commit("pending", "a")
    stage.prepare(stage.gradient(["a"]), 2)
    stage.reset()
    assert stage.step == 0
    assert not stage.gradient(["a"]).any()
    with pytest.raises(ValueError, match="nothing is prepared"):
        stage.apply()


def test_a_gradient_that_is_not_finite_prepares_nothing():
    stage = make_stage()
    gradient = normal(stage.num_gradients)
    gradient[17] = float("inf")
    with pytest.raises(NonFinite):
        stage.prepare(gradient, 4)
    with pytest.raises(ValueError, match="nothing is prepared"):
        stage.apply()


@pytest.mark.parametrize(("missing", "count"), [(1, 4), (0, 0)], ids=["length", "count"])
def test_prepare_refuses_what_makes_no_sense(missing, count):
    stage = make_stage()
    with pytest.raises(ValueError):
        stage.prepare(torch.zeros(stage.num_gradients - missing), count)


def test_training_lowers_the_loss():
    manifest = make_manifest(training={"optimizer": {"learning_rate": 0.01}})
    stages = edge, *blocks = make_edge(manifest), *make_blocks(manifest)
    losses = []
    for _ in range(8):
        losses.append(run_microbatch(edge, list(blocks), 0, 0))
        for stage in stages:
            stage.prepare(stage.gradient(["d"]), 1)
            stage.apply()
    assert losses[-1] < losses[0] - 1


# --- exported state ------------------------------------------------------------------------


def test_digest_is_the_hash_of_the_exported_bytes():
    stage = make_stage()
    for _ in range(2):
        raw = stage.export_state().numpy().tobytes()
        assert sha256(raw).hexdigest() == stage.digest
        step(stage)


def test_an_imported_state_goes_on_as_the_original():
    stage, joiner = make_stage(), make_stage()
    for count in range(3):
        step(stage, seed=count)
    work(joiner, "stale")
    joiner.prepare(normal(joiner.num_gradients), 2)
    joiner.import_state(stage.export_state(), stage.digest)
    assert (joiner.step, joiner.digest) == (3, stage.digest)
    with pytest.raises(KeyError):
        joiner.commit("stale", "a")
    step(stage, seed=9)
    step(joiner, seed=9)
    assert joiner.digest == stage.digest
    assert torch.equal(joiner.export_state(), stage.export_state())


def test_an_exported_state_outlives_later_steps():
    stage = make_stage()
    step(stage)
    exported, digest = stage.export_state(), stage.digest
    step(stage)
    step(stage)
    fresh = make_stage()
    fresh.import_state(exported, digest)
    assert fresh.step == 1


@pytest.mark.parametrize("place", [0, 8, 40, -1], ids=["length", "brace", "header", "data"])
def test_a_flipped_bit_is_refused(place):
    stage, joiner = make_stage(), make_stage()
    step(stage)
    before = joiner.digest
    exported = stage.export_state()
    exported[place] ^= 1
    with pytest.raises(StateMismatch):
        joiner.import_state(exported, stage.digest)
    # Even under its own digest, a wrong header is no state of this stage.
    if place >= 0:
        with pytest.raises(StateMismatch):
            joiner.import_state(exported, sha256(exported.numpy().tobytes()).hexdigest())
    assert (joiner.step, joiner.digest) == (0, before)
    assert torch.equal(flat_weights(joiner), flat_weights(make_stage()))


def foreign_states():
    stage = make_stage()
    sgd = make_manifest(training={"optimizer": {"name": "sgd"}})
    reseeded = make_manifest(training={"seed": 99})
    exported = stage.export_state()
    header = b'{"__metadata__":{"step":"0","swarm":"%s"}}' % MANIFEST.swarm_id.encode()
    return {
        "another stage": TorchBlockStage(MANIFEST, 2).export_state(),
        "another swarm of the same shape": make_stage(reseeded).export_state(),
        "another optimiser": make_stage(sgd).export_state(),
        "too short": exported[:-4],
        "too long": torch.cat([exported, exported[-4:]]),
        "empty": exported[:0],
        "no fields": torch.frombuffer(
            bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8
        ),
        "a header too deep": torch.frombuffer(
            bytearray((100_000).to_bytes(8, "little") + b"[" * 100_000), dtype=torch.uint8
        ),
    }


@pytest.mark.parametrize("name", list(foreign_states()))
def test_a_state_of_something_else_is_refused(name):
    exported = foreign_states()[name]
    digest = sha256(exported.numpy().tobytes()).hexdigest()
    with pytest.raises(StateMismatch):
        make_stage().import_state(exported, digest)


def test_a_state_is_a_safetensors_file():
    stage = make_stage()
    step(stage)
    raw = stage.export_state().numpy().tobytes()
    tensors = load(raw)
    weights = stage.named_weights()
    moments = [f"moment_{number}.{name}" for number in (1, 2) for name in weights]
    assert sorted(tensors) == sorted([*weights, *moments])
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    assert all(tensors[name].any() for name in moments)
    assert int.from_bytes(raw[:8], "little") % 8 == 0  # the numbers are aligned


def test_a_state_of_another_swarm_is_called_so():
    exported = make_stage(make_manifest(training={"seed": 99})).export_state()
    with pytest.raises(StateMismatch, match="another swarm"):
        make_stage().import_state(exported, sha256(exported.numpy().tobytes()).hexdigest())


def test_a_state_that_is_not_bytes_is_refused():
    stage = make_stage()
    with pytest.raises(StateMismatch):
        stage.import_state(stage.export_state().float(), stage.digest)
