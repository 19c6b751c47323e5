"""The reference is itself held: its model by transformers', its optimisers by torch's."""

from __future__ import annotations

import pytest
import torch
from reference.loop import LoggedStep, Optimizer, clip_, layers_per_stage, run, stage_parameters
from reference.model import EMBEDDING, HEAD, Shape, logits, mean_loss
from reference.recipe import Text, initial_weights

MANIFEST = {
    "model": {
        "layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48,
        "vocabulary": 300, "context": 24, "rope_base": 5000.0, "norm_epsilon": 1e-5,
    },
    "pipeline": {"stages": [1, 2]},
    "training": {
        "steps": 4, "quota": 2, "microbatch": 2, "clip_norm": 0.5, "seed": 3,
        "optimizer": {
            "name": "adamw", "learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95,
            "epsilon": 1e-8, "weight_decay": 0.1, "momentum": 0.9,
        },
        "schedule": {"kind": "constant", "warmup_steps": 0, "final_fraction": 0.1},
    },
    "data": {"seed": 7, "validation_fraction": 0.1},
}  # fmt: skip
DOCUMENTS = [bytes((3 * k + j) % 250 + 1 for j in range(40)) for k in range(30)]


@pytest.fixture(scope="module")
def wide_weights() -> dict[str, torch.Tensor]:
    """Weights large enough that attention is far from uniform."""
    return {name: 10 * weight for name, weight in initial_weights(MANIFEST).items()}


def hugging_face_model(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """The same model by transformers, its gains left at one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    m = MANIFEST["model"]
    config = LlamaConfig(
        hidden_size=m["width"], intermediate_size=m["feed_forward"], vocab_size=m["vocabulary"],
        num_hidden_layers=m["layers"], num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"], max_position_embeddings=m["context"],
        rms_norm_eps=m["norm_epsilon"], tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": m["rope_base"]},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("norm" in name for name in missing)
    return model


def test_logits_equal_transformers(wide_weights: dict[str, torch.Tensor]) -> None:
    tokens = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = hugging_face_model(wide_weights)(tokens).logits
        ours = logits(wide_weights, tokens, Shape.of(MANIFEST["model"]))
    assert theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rope_base_is_not_ignored(wide_weights: dict[str, torch.Tensor]) -> None:
    tokens = torch.randint(0, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    one, other = (
        logits(wide_weights, tokens, Shape.of({**MANIFEST["model"], "rope_base": base}))
        for base in (5000.0, 10000.0)
    )
    assert not torch.allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_optimizer_equals_torch(name: str) -> None:
    settings = {**MANIFEST["training"]["optimizer"], "name": name}
    generator = torch.Generator().manual_seed(1)
    ours = {"w": torch.randn(5, 7, generator=generator)}
    theirs = ours["w"].clone().requires_grad_()
    optimizer, rate = Optimizer(settings, ours), settings["learning_rate"]
    if name == "adamw":
        torchs: torch.optim.Optimizer = torch.optim.AdamW(
            [theirs], lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
    else:
        torchs = torch.optim.SGD([theirs], lr=rate, momentum=0.9, weight_decay=0.1)
    for count in range(1, 6):
        theirs.grad = torch.randn(5, 7, generator=generator)
        optimizer.step(ours, {"w": theirs.grad.clone()}, rate, count)
        torchs.step()
    torch.testing.assert_close(ours["w"], theirs.detach(), rtol=1e-6, atol=1e-7)


def test_one_step_equals_torch_on_the_whole_batch() -> None:
    """Averaging microbatches, clipping by stage and AdamW, against torch's own pieces."""
    text = Text(MANIFEST, DOCUMENTS)
    weights = initial_weights(MANIFEST)
    plain = {name: w.clone().requires_grad_() for name, w in weights.items()}
    batch = torch.cat([text.draw("a", 0, slot) for slot in (0, 1)])
    loss = mean_loss(plain, batch, Shape.of(MANIFEST["model"]))
    loss.backward()
    for names in stage_parameters(plain, [1, 2]):
        torch.nn.utils.clip_grad_norm_([plain[name] for name in names], 0.5)
    torch.optim.AdamW(plain.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1).step()
    outcome = run(MANIFEST, weights, [LoggedStep(0, (("a", 0), ("a", 1)))], text.draw)
    assert outcome.losses[0] == pytest.approx(loss.item(), rel=1e-6)
    for name, weight in outcome.weights.items():
        torch.testing.assert_close(weight, plain[name].detach(), rtol=1e-3, atol=1e-5, msg=name)


def test_clip_scales_to_the_limit_and_leaves_small_gradients() -> None:
    large = [torch.full((3,), 2.0), torch.full((2,), -2.0)]
    assert clip_(large, 1.0) == pytest.approx(20**0.5)
    assert torch.cat(large).norm().item() == pytest.approx(1.0, rel=1e-5)
    small = [torch.full((3,), 0.1)]
    clip_(small, 1.0)
    assert torch.equal(small[0], torch.full((3,), 0.1))


def test_stages_split_the_parameters() -> None:
    weights = initial_weights(MANIFEST)
    edge, first, second = stage_parameters(weights, layers_per_stage([1, 2], 3))
    assert edge == [EMBEDDING, HEAD]
    assert {name.split(".")[2] for name in first} == {"0"}
    assert {name.split(".")[2] for name in second} == {"1", "2"}
    assert layers_per_stage(3, 6) == [2, 2, 2]


def test_a_dead_data_nodes_slots_are_left_out() -> None:
    text = Text(MANIFEST, DOCUMENTS)
    whole = [LoggedStep(0, (("a", 0), ("b", 1)))]
    voided = [LoggedStep(0, (("a", 0),))]
    one, other = (
        run(MANIFEST, initial_weights(MANIFEST), log, text.draw) for log in (whole, voided)
    )
    assert one.losses[0] != other.losses[0]
    assert not torch.equal(one.weights[HEAD], other.weights[HEAD])
