"""What the stages compute: initial weights, blocks, edge, chains of stages, export."""

from __future__ import annotations

import json
import math
from hashlib import sha256

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from stages_kit import make_blocks, make_edge, make_manifest, normal, run_microbatch

from protocol.errors import NonFinite, ProtocolViolation
from stages import TorchBlockStage, save_stage, stage_bytes

WHOLE = make_manifest(pipeline={"stages": 1})
HALVES = make_manifest(pipeline={"stages": 2})
UNEVEN = make_manifest(pipeline={"stages": [1, 3]})


def gradients(stages):
    """Gradient by parameter name of the group that run_microbatch commits to."""
    return {
        name: view
        for stage in stages
        for name, view in stage._layout.named_views(stage.gradient(["d"])).items()
    }


# --- initial weights -----------------------------------------------------------------------


def test_stage_alone_starts_as_its_part_of_the_whole():
    whole = make_blocks(WHOLE)[0].named_weights()
    for manifest in (HALVES, UNEVEN):
        parts = [stage.named_weights() for stage in make_blocks(manifest)]
        assert [name for part in parts for name in part] == list(whole)
        for part in parts:
            assert all(torch.equal(weight, whole[name]) for name, weight in part.items())


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.layers.3.self_attn.k_proj.weight", 0.02),
        ("model.layers.2.mlp.down_proj.weight", 0.02 / math.sqrt(8)),
        ("model.embed_tokens.weight", 0.02),
    ],
)
def test_initial_weights_follow_the_documented_recipe(name, std):
    stages = [make_edge(HALVES), *make_blocks(HALVES)]
    weight = {n: w for stage in stages for n, w in stage.named_weights().items()}[name]
    key = int.from_bytes(sha256(f"shoal/init/5/{name}".encode()).digest()[:16], "little")
    expected = np.random.Generator(np.random.Philox(key=key)).standard_normal(tuple(weight.shape))
    assert np.array_equal(weight.numpy(), (expected * std).astype(np.float32))


def test_another_seed_gives_other_weights():
    other = make_manifest(training={"seed": 6})
    assert make_blocks(other)[0].digest != make_blocks(HALVES)[0].digest


# --- blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", [HALVES, UNEVEN], ids=["equal", "uneven"])
def test_chain_of_stages_equals_one_stage(manifest):
    one, many = make_blocks(WHOLE), make_blocks(manifest)
    edges = make_edge(WHOLE), make_edge(manifest)
    losses = [run_microbatch(edges[0], one, 0, 0), run_microbatch(edges[1], many, 0, 0)]
    assert losses[0] == losses[1]
    expected, found = gradients([edges[0], *one]), gradients([edges[1], *many])
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_gradient_by_input_is_the_derivative():
    stage = TorchBlockStage(HALVES, 2)
    h, g, direction = normal(2, 5, 32), normal(2, 5, 32, seed=1), normal(2, 5, 32, seed=2)
    stage.forward("w", h, keep=True)
    slope = float((stage.backward("w", g) * direction).double().sum())
    size = 1e-2
    ahead = stage.forward("a", h + size * direction, keep=False)
    behind = stage.forward("b", h - size * direction, keep=False)
    measured = float(((ahead - behind).double() * g).sum()) / (2 * size)
    assert slope == pytest.approx(measured, rel=1e-3)


def test_recomputing_gives_the_same_bits():
    kept, redone = TorchBlockStage(HALVES, 1), TorchBlockStage(HALVES, 1, recompute=True)
    h, g = normal(3, 12, 32), normal(3, 12, 32, seed=1)
    assert torch.equal(kept.forward("w", h, keep=True), redone.forward("w", h, keep=True))
    assert redone.bytes_kept < kept.bytes_kept
    assert torch.equal(kept.backward("w", g), redone.backward("w", g))
    for stage in (kept, redone):
        stage.commit("w", "d")
    assert torch.equal(kept.gradient(["d"]), redone.gradient(["d"]))


def test_microbatches_in_flight_do_not_mix():
    stage, alone = TorchBlockStage(HALVES, 1), TorchBlockStage(HALVES, 1)
    inputs = [normal(3, 12, 32, seed=k) for k in range(3)]
    for key, h in enumerate(inputs):
        stage.forward(key, h, keep=True)
    for key in (2, 0, 1):
        alone.forward(key, inputs[key], keep=True)
        assert torch.equal(stage.backward(key, inputs[key]), alone.backward(key, inputs[key]))


def test_a_token_sees_only_what_precedes_it():
    stage = TorchBlockStage(HALVES, 1)
    h = normal(1, 12, 32)
    changed = h.clone()
    changed[:, 7] += 1
    before, after = stage.forward("a", h, keep=False), stage.forward("b", changed, keep=False)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_wire_dtype_is_what_leaves_and_either_may_arrive():
    manifest = make_manifest(pipeline={"wire_dtype": "bfloat16"})
    exact, rounded = TorchBlockStage(HALVES, 1), TorchBlockStage(manifest, 1)
    h = normal(3, 12, 32).bfloat16()
    expected = exact.forward("w", h.float(), keep=True)
    found = rounded.forward("w", h, keep=True)
    assert expected.dtype == torch.float32
    assert torch.equal(found, expected.bfloat16())
    assert torch.equal(rounded.backward("w", h), exact.backward("w", h).bfloat16())


def test_forward_without_keeping_leaves_nothing_for_backward():
    stage = TorchBlockStage(HALVES, 1)
    stage.forward("w", normal(1, 4, 32), keep=False)
    assert stage.bytes_kept == 0
    with pytest.raises(KeyError):
        stage.backward("w", normal(1, 4, 32))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(poison):
    stage, edge = TorchBlockStage(HALVES, 2), make_edge(HALVES)
    bad = normal(3, 12, 32)
    bad[1, 2, 3] = poison
    with pytest.raises(NonFinite) as caught:
        stage.forward("w", bad, keep=True)
    assert (caught.value.stage, caught.value.direction) == (2, "forward")
    stage.forward("w", normal(3, 12, 32), keep=True)
    with pytest.raises(NonFinite) as caught:
        stage.backward("w", bad)
    assert (caught.value.stage, caught.value.direction) == (2, "backward")
    stage.backward("w", normal(3, 12, 32))  # the kept graph survived the bad gradient
    edge.embed("w", 0, 0)
    with pytest.raises(NonFinite):
        edge.loss_and_gradient("w", bad)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(3, 12, 31),
        torch.zeros(3, 13, 32),
        torch.zeros(0, 12, 32),
        torch.zeros(12, 32),
        torch.zeros(3, 12, 32, dtype=torch.float64),
    ],
    ids=["width", "longer than context", "empty", "rank", "dtype"],
)
def test_a_wrong_shape_is_the_peers_fault(bad):
    with pytest.raises(ProtocolViolation):
        TorchBlockStage(HALVES, 1).forward("w", bad, keep=True)


def test_a_gradient_of_another_shape_is_the_peers_fault():
    stage = TorchBlockStage(HALVES, 1)
    stage.forward("w", normal(3, 12, 32), keep=True)
    with pytest.raises(ProtocolViolation):
        stage.backward("w", normal(3, 11, 32))


# --- edge ----------------------------------------------------------------------------------


def test_edge_equals_plain_autograd():
    edge = make_edge(HALVES)
    weights = {n: w.clone().requires_grad_() for n, w in edge.named_weights().items()}
    window = edge._source.draw(0, 0)
    embedded = torch.nn.functional.embedding(window[:, :-1], weights["model.embed_tokens.weight"])
    assert torch.equal(edge.embed("w", 0, 0), embedded)
    h = normal(3, 12, 32).requires_grad_()
    scaled = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    logits = scaled @ weights["lm_head.weight"].T
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
    g = normal(3, 12, 32, seed=1)
    torch.autograd.backward([loss, embedded], [None, g])

    found_loss, found_g = edge.loss_and_gradient("w", h.detach())
    edge.embed_backward("w", g)
    edge.commit("w", "d")
    assert found_loss == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(found_g, h.grad, rtol=1e-5, atol=1e-8)
    for name, gradient in gradients([edge]).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-5, atol=1e-7)


def test_half_a_microbatch_cannot_be_committed():
    edge = make_edge(HALVES)
    h = edge.embed("w", 0, 0)
    edge.loss_and_gradient("w", h)
    with pytest.raises(KeyError):
        edge.commit("w", "d")
    edge.embed_backward("w", h)
    edge.commit("w", "d")


def test_validation_keeps_nothing():
    edge = make_edge(HALVES)
    loss = edge.loss("v", edge.embed_validation("v", 0))
    assert loss == pytest.approx(math.log(257), rel=0.05)
    assert edge.bytes_kept == 0
    with pytest.raises(KeyError):
        edge.loss("v", normal(3, 12, 32))


def test_generation_sees_the_last_position():
    edge, blocks = make_edge(HALVES), make_blocks(HALVES)
    tokens = torch.tensor([[5, 250, 7]])
    pin = edge.pin(0, is_whole=False)
    h = edge.embed_tokens(pin, tokens)
    for block in blocks:
        h = block.forward("g", h, keep=False)
    logits = edge.logits(pin, h)
    assert logits.shape == (1, 257)
    assert torch.equal(edge.logits(pin, h[:, -1:]), logits)
    assert not torch.equal(edge.logits(pin, h[:, :2]), logits)


# --- memory and export ---------------------------------------------------------------------


def test_memory_estimate_covers_what_autograd_keeps():
    stage = TorchBlockStage(HALVES, 1)
    fixed = {t.untyped_storage().data_ptr() for t in (stage._current.data, *stage._rotary)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward("w", normal(3, 12, 32), keep=True)
    truth = sum(size for place, (_, size) in saved.items() if place not in fixed)
    assert truth <= stage.bytes_kept <= 1.3 * truth


def test_stage_bytes_grows_with_capacity_and_shrinks_with_recomputation():
    one, two = (stage_bytes(HALVES, 1, capacity) for capacity in (1, 2))
    assert two - one >= 4 * TorchBlockStage(HALVES, 1).num_gradients
    assert stage_bytes(HALVES, 1, 4, recompute=True) < stage_bytes(HALVES, 1, 4)
    assert stage_bytes(HALVES, 0, 1) > 0


def test_exported_stages_are_a_hugging_face_llama(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    edge, blocks = make_edge(HALVES), make_blocks(HALVES)
    tensors = {}
    for stage in (edge, *blocks):
        tensors |= load_file(save_stage(stage, HALVES.model, tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    llama = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager"))
    llama.load_state_dict(tensors, strict=True)
    tokens = edge._source.draw(0, 0)[:, :-1]
    pin = edge.pin(0, is_whole=False)
    h = edge.embed_tokens(pin, tokens)
    for block in blocks:
        h = block.forward("w", h, keep=False)
    with torch.no_grad():
        expected = llama(tokens).logits[:, -1]
    torch.testing.assert_close(edge.logits(pin, h), expected, rtol=1e-5, atol=1e-6)
