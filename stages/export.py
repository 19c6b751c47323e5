"""A stage's weights as safetensors that Hugging Face's Llama loads as they are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from protocol.manifest import ModelSpec
from stages.state import TorchStageState


def llama_config(model: ModelSpec) -> dict[str, object]:
    """Return the ``config.json`` of the whole model for Hugging Face's LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.width,
        "intermediate_size": model.feed_forward,
        "max_position_embeddings": model.context,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": model.dtype,
        "vocab_size": model.vocabulary,
    }


def llama_tensors(stage: TorchStageState) -> dict[str, torch.Tensor]:
    """Return the stage's weights by Hugging Face name, with gains of one where Llama has a gain."""
    tensors = {name: weight.clone() for name, weight in stage.named_weights().items()}
    width = next(iter(tensors.values())).shape[1]
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    norms = [
        f"model.layers.{layer}.{norm}.weight"
        for layer in layers
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    for name in norms or ["model.norm.weight"]:
        tensors[name] = torch.ones(width)
    return tensors


def save_stage(stage: TorchStageState, model: ModelSpec, folder: Path) -> Path:
    """Write ``stage-<k>.safetensors`` (and config.json) into ``folder``; return its path.

    The file appears complete or not at all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage-{stage.stage:04d}.safetensors"
    partial = path.with_suffix(".partial")
    metadata = {"format": "pt", "stage": str(stage.stage), "step": str(stage.step)}
    save_file(llama_tensors(stage), partial, metadata)
    partial.replace(path)
    (folder / "config.json").write_text(json.dumps(llama_config(model), indent=2) + "\n")
    return path
