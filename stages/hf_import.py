"""A folder of Hugging Face's Llama, read as the weights with which a swarm begins.

Our norms have no gain, so each gain is folded into the matrices that follow it: W (g x) = (W g) x.
Matrices become fp32. What our model cannot compute is refused.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import ConfigError
from protocol.manifest import Manifest
from stages.hf_folder import INDEX_NAME
from stages.layout import EMBEDDING_NAME, HEAD_NAME, Parameter, initial_head, stage_layout

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HINT = "A swarm can begin with a plain Llama in safetensors, as `transformers` saves it."
# What must be so, or be missing: our model has no other way.
_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "quantization_config": None,
}
_SHAPE = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}


class LlamaFolder:
    """The model in a folder. A context manager: its files are open while it is entered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config = _read_config(folder)
        self._is_tied = bool(self._config.get("tie_word_embeddings"))
        self._files = ExitStack()
        self._places: dict[str, Any] = {}

    def model_tables(self) -> dict[str, object]:
        """Return the manifest's [model] table, without the tokenizer; raise ConfigError."""
        config = {"num_key_value_heads": self._config.get("num_attention_heads"), **self._config}
        for name, wanted in _FIXED.items():
            if config.get(name, wanted) != wanted:
                raise ConfigError(f"{name} is {config[name]!r}, not {wanted!r}", _HINT)
        missing = [theirs for theirs in _SHAPE.values() if config.get(theirs) is None]
        if missing:
            raise ConfigError(f"config.json of {self.folder} has no {', '.join(missing)}", _HINT)
        tables: dict[str, object] = {ours: config[theirs] for ours, theirs in _SHAPE.items()}
        head_width = (
            config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        )
        if head_width * config["num_attention_heads"] != config["hidden_size"]:
            raise ConfigError(f"head_dim {head_width} is not hidden_size / heads", _HINT)
        return {**tables, "rope_base": _rope_base(config)}

    def __enter__(self) -> Self:
        for path in self._paths():
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {path}: {error}", _HINT) from error
            self._places.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def _paths(self) -> list[Path]:
        index = self.folder / INDEX_NAME
        if index.exists():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
                return [self.folder / Path(name).name for name in sorted(names)]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"{index} is not an index of safetensors", _HINT) from error
        return [self.folder / "model.safetensors"]

    def check(self, manifest: Manifest) -> None:
        """Raise ConfigError if a tensor is missing, has another shape, or is one too many."""
        known = set()
        for stage in range(manifest.num_stages + 1):
            for parameter in stage_layout(manifest, stage).parameters:
                names = [(self._source(parameter), [parameter.rows, parameter.columns])]
                names += [(gain, [manifest.model.width]) for gain in _gain_before(parameter)]
                for name, shape in names:
                    self._check_tensor(name, shape)
                    known.add(name)
        tied = {HEAD_NAME} if self._is_tied else set()
        strange = [n for n in self._places if n not in known | tied and "inv_freq" not in n]
        if strange:
            raise ConfigError(
                f"{self.folder} has {len(strange)} tensors that no Llama has: {strange[0]}", _HINT
            )

    def _check_tensor(self, name: str, shape: list[int]) -> None:
        if name not in self._places:
            raise ConfigError(f"{self.folder} has no tensor {name}", _HINT)
        found = self._places[name].get_slice(name).get_shape()
        if list(found) != shape:
            raise ConfigError(f"{name} has shape {found}, config.json says {shape}", _HINT)

    def _source(self, parameter: Parameter) -> str:
        return EMBEDDING_NAME if parameter.name == HEAD_NAME and self._is_tied else parameter.name

    def write_stage(self, manifest: Manifest, stage: int, path: Path) -> str:
        """Write the weights with which a stage begins; return the SHA-256 (hex) of the file."""
        layout = stage_layout(manifest, stage)
        head = initial_head(layout)
        digest = sha256(head)
        with path.open("wb") as file:
            file.write(head)
            for parameter in layout.parameters:
                data = self._folded(parameter).numpy().tobytes()
                digest.update(data)
                file.write(data)
        return digest.hexdigest()

    def _folded(self, parameter: Parameter) -> torch.Tensor:
        """Return the fp32 matrix with the gain before it in it."""
        matrix = self._tensor(self._source(parameter))
        for gain in _gain_before(parameter):
            matrix = matrix * self._tensor(gain)
        if not torch.isfinite(matrix).all():
            raise ConfigError(f"{parameter.name} holds NaN or infinity", "Take another model.")
        return matrix.contiguous()

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._places[name].get_tensor(name)
        if tensor.dtype not in _FLOATS:
            raise ConfigError(f"{name} is of {tensor.dtype}: quantised models do not fit", _HINT)
        return tensor.to(torch.float32)


def _gain_before(parameter: Parameter) -> list[str]:
    """Name the gain of the norm whose output this matrix takes, if there is one."""
    *path, _ = parameter.name.split(".")
    if parameter.name == HEAD_NAME:
        return ["model.norm.weight"]
    if path[-1] in ("q_proj", "k_proj", "v_proj"):
        return [".".join([*path[:3], "input_layernorm", "weight"])]
    if path[-1] in ("gate_proj", "up_proj"):
        return [".".join([*path[:3], "post_attention_layernorm", "weight"])]
    return []


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", _HINT) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not an object", _HINT)
    return config


def _rope_base(config: dict[str, Any]) -> float:
    """Rotary positions as transformers writes them, before and since its version 5."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_type is {rope['rope_type']!r}, not 'default'", _HINT)
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
