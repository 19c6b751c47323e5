"""Export to Hugging Face's form and import from it, against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stages_kit import make_blocks, make_edge, make_manifest
from test_stages_cache import MODELS, models, trained

from protocol.errors import ConfigError, StateMismatch
from stages.hf_folder import (
    StageFile,
    stage_file_name,
    write_config,
    write_index,
    write_tokenizer,
)
from stages.hf_import import LlamaFolder
from stages.tokenizer import ByteTokenizer, make_tokenizer

TEXT = "def héllo(x):\n\treturn '😀' \x00 and  x"


def write_folder(folder: Path, manifest, stages, *, piece: int = 777) -> None:
    """What ``shoal export`` writes, its bytes in pieces of a length that fits nothing."""
    folder.mkdir()
    files = []
    for stage in stages:
        file = StageFile(
            folder / stage_file_name(stage.stage, len(stages) - 1), manifest.model.width
        )
        data = stage.export_state().numpy().tobytes()
        for first in range(0, len(data), piece):
            file.feed(data[first : first + piece], is_first=not first)
        file.end(stage.digest)
        files.append(file)
    write_index(folder, files)
    tokenizer = make_tokenizer(manifest.model)
    write_config(folder, manifest.model, tokenizer.separator)
    write_tokenizer(folder, tokenizer.to_json(), tokenizer.separator_name, manifest.model.context)


def loaded(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def our_logits(edge, blocks, tokens_BT):
    """The logits of the last position, by our stages."""
    pin = edge.pin(edge.step, is_whole=False)
    h_BTW = edge.embed_tokens(pin, tokens_BT)
    for block in blocks:
        h_BTW = block.forward("w", h_BTW, keep=False)
    return edge.logits(pin, h_BTW)


def tokens_of(manifest, num_tokens: int = 11):
    chance = torch.Generator().manual_seed(3)
    return torch.randint(manifest.model.vocabulary, (2, num_tokens), generator=chance)


@models
def test_transformers_computes_what_our_stages_compute(name: str, tmp_path: Path) -> None:
    manifest = MODELS[name]
    edge, blocks = trained(manifest)
    for stage in (edge, *blocks):
        stage._current.data[0].mul_(5)
        stage._digest = None
    write_folder(tmp_path / "hf", manifest, [edge, *blocks])
    tokens_BT = tokens_of(manifest)
    with torch.no_grad():
        theirs = loaded(tmp_path / "hf")(tokens_BT).logits[:, -1]
    assert theirs.std() > 0.1
    torch.testing.assert_close(our_logits(edge, blocks, tokens_BT), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocabulary", [256, 257, 300])
def test_transformers_reads_the_tokenizer(vocabulary: int, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    manifest = make_manifest(model={"vocabulary": vocabulary})
    write_folder(tmp_path / "hf", manifest, [make_edge(manifest), *make_blocks(manifest)])
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), ByteTokenizer(vocabulary)
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT), clean_up_tokenization_spaces=False) == TEXT
    assert theirs.eos_token_id == (256 if vocabulary > 256 else None)
    assert loaded(tmp_path / "hf").generation_config.eos_token_id == ours.separator


def test_a_stage_that_begins_anew_is_written_once(tmp_path: Path) -> None:
    stage = make_blocks(MODELS["plain"])[0]
    data = stage.export_state().numpy().tobytes()
    file = StageFile(tmp_path / "x.safetensors", 32)
    file.feed(data[: len(data) // 2], is_first=True)
    file.feed(data[:9], is_first=True)
    file.feed(data[9:], is_first=False)
    file.end(stage.digest)
    written = load_file(tmp_path / "x.safetensors")
    assert torch.equal(written.pop("model.layers.0.input_layernorm.weight"), torch.ones(32))
    for name, weight in stage.named_weights().items():
        assert torch.equal(written[name], weight)
    assert not [name for name in written if "moment" in name]


@pytest.mark.parametrize("spoil", ["last byte", "end", "digest"])
def test_bytes_of_another_state_are_refused(spoil: str, tmp_path: Path) -> None:
    stage = make_blocks(MODELS["plain"])[0]
    data = bytearray(stage.export_state().numpy().tobytes())
    if spoil == "last byte":
        data[-1] ^= 1
    file = StageFile(tmp_path / "x.safetensors", 32)
    file.feed(bytes(data[: 5000 if spoil == "end" else None]), is_first=True)
    with pytest.raises(StateMismatch):
        file.end("0" * 64 if spoil == "digest" else stage.digest)


# --- import --------------------------------------------------------------------------------


def save_llama(folder: Path, manifest, **config) -> torch.nn.Module:
    """A model of transformers' own with gains that are not one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = manifest.model
    settings = {
        "hidden_size": shape.width, "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.context, "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "tie_word_embeddings": False, "initializer_range": 0.2, **config,
    }  # fmt: skip
    torch.manual_seed(4)
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.3, 1.7)
    model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer.json").write_text(ByteTokenizer(shape.vocabulary).to_json())
    return model


def begun(folder: Path, manifest, weights: Path):
    """Our stages with the weights of a folder."""
    weights.mkdir()
    edge, blocks = make_edge(manifest), make_blocks(manifest)
    with LlamaFolder(folder) as llama:
        llama.check(manifest)
        for stage in (edge, *blocks):
            path = weights / f"{stage.stage}.safetensors"
            digest = llama.write_stage(manifest, stage.stage, path)
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            stage.begin_with(data, digest)
    return edge, blocks


@models
@pytest.mark.parametrize("tied", [False, True])
def test_an_imported_model_computes_the_same(name: str, tied: bool, tmp_path: Path) -> None:
    manifest = MODELS[name]
    llama = save_llama(tmp_path / "hf", manifest, tie_word_embeddings=tied)
    tables = LlamaFolder(tmp_path / "hf").model_tables()
    assert tables == manifest.model.model_dump(include=set(tables))
    edge, blocks = begun(tmp_path / "hf", manifest, tmp_path / "w")
    tokens_BT = tokens_of(manifest)
    with torch.no_grad():
        theirs = llama(tokens_BT).logits[:, -1]
    assert theirs.std() > 0.1
    torch.testing.assert_close(our_logits(edge, blocks, tokens_BT), theirs, rtol=1e-4, atol=1e-4)


@models
def test_what_was_exported_is_imported_bit_by_bit(name: str, tmp_path: Path) -> None:
    manifest = MODELS[name]
    stages = trained(manifest)
    write_folder(tmp_path / "hf", manifest, [stages[0], *stages[1]])
    edge, blocks = begun(tmp_path / "hf", manifest, tmp_path / "w")
    for before, after in zip((stages[0], *stages[1]), (edge, *blocks), strict=True):
        assert after.step == 0
        for weight, twin in zip(
            before.named_weights().values(), after.named_weights().values(), strict=True
        ):
            assert torch.equal(weight, twin)
    assert not edge._current.data[1:].any()


def test_half_precision_becomes_single(tmp_path: Path) -> None:
    manifest = MODELS["plain"]
    save_llama(tmp_path / "hf", manifest).to(torch.bfloat16).save_pretrained(tmp_path / "bf16")
    edge, _ = begun(tmp_path / "bf16", manifest, tmp_path / "w")
    stored = load_file(tmp_path / "bf16" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(edge.named_weights()["model.embed_tokens.weight"], stored.float())


def test_weights_of_another_stage_or_digest_are_refused(tmp_path: Path) -> None:
    manifest = MODELS["plain"]
    save_llama(tmp_path / "hf", manifest)
    stage = make_blocks(manifest)[0]
    before = stage.digest
    with LlamaFolder(tmp_path / "hf") as llama:
        for wrong in (2, 1):
            path = tmp_path / "w"
            digest = llama.write_stage(manifest, wrong, path)
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            if wrong == 1:
                data[-1] ^= 1
            with pytest.raises(StateMismatch):
                stage.begin_with(data, digest)
    assert stage.digest == before


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type"),
        ({"head_dim": 16}, "head_dim"),
        ({"hidden_size": None}, "hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_what_our_model_cannot_compute_is_refused(config, word: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", MODELS["plain"])
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(ConfigError, match=word):
        LlamaFolder(tmp_path / "hf").model_tables()


def spoiled(tensors, how: str):
    name = "model.layers.1.mlp.gate_proj.weight"
    if how == "missing":
        del tensors[name]
    elif how == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif how == "strange":
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(32)
    elif how == "quantised":
        tensors[name] = tensors[name].to(torch.int8)
    else:
        tensors[name][3, 3] = torch.inf
    return tensors


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "has no tensor model.layers.1.mlp.gate_proj"),
        ("shape", "has shape"),
        ("strange", "q_proj.bias"),
        ("quantised", "quantised"),
        ("infinite", "NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit_are_named(how: str, words: str, tmp_path: Path) -> None:
    manifest = MODELS["plain"]
    save_llama(tmp_path / "hf", manifest)
    folder = tmp_path / "one"
    folder.mkdir()
    tensors = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
    save_file(spoiled(tensors, how), folder / "model.safetensors")
    (folder / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        begun(folder, manifest, tmp_path / "w")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(missing: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    if missing != "config.json":
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"\x05" * 30)
    with pytest.raises(ConfigError, match="cannot read"), LlamaFolder(folder):
        pass
