"""The folder that Hugging Face's ``transformers`` loads: one safetensors file per stage, an index,
config and tokenizer. A stage's file is written from the canonical bytes of its state as they come.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import torch

from protocol.errors import StateMismatch
from protocol.manifest import Manifest, ModelSpec
from stages.export import llama_config
from stages.layout import EMBEDDING_NAME, safetensors_head, stage_layout

INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 2**26


class StageFile:
    """Writes one stage's weights to ``path`` while the bytes of its state come in; the moments of
    the optimiser are looked at for the digest alone.
    """

    def __init__(self, path: Path, width: int) -> None:
        self.path = path
        self.names: dict[str, int] = {}  # bytes by name, gains included
        self._width = width
        self._file: BinaryIO = path.open("wb")
        self._begin()

    def _begin(self) -> None:
        self._digest = sha256()
        self._head = b""
        self._left: int | None = None  # bytes of weights to come; None before the header

    def feed(self, data: bytes, *, is_first: bool) -> None:
        """Take the next bytes; with ``is_first``, what came before is void."""
        if is_first:
            self._file.seek(0)
            self._file.truncate()
            self._begin()
        self._digest.update(data)
        if self._left is None:
            self._head += data
            data = self._open_head()
        if self._left:
            self._file.write(data[: self._left])
            self._left -= min(len(data), self._left)

    def end(self, digest: str) -> None:
        """Write the gains; raise StateMismatch unless the bytes had this digest."""
        with self._file:
            if self._left != 0 or self._digest.hexdigest() != digest:
                raise StateMismatch("the state that arrived is not the one that was asked for")
            num_gains = sum("norm" in name for name in self.names)
            self._file.write(torch.ones(num_gains * self._width).numpy().tobytes())

    def close(self) -> None:
        """End the file as it is, for nobody wants it; may be repeated."""
        self._file.close()

    def _open_head(self) -> bytes:
        """Write the file's header once the state's is there; return the weights behind it."""
        end = _LENGTH_BYTES + int.from_bytes(self._head[:_LENGTH_BYTES], "little")
        if end > _MOST_HEADER_BYTES:
            raise StateMismatch("the state's header is too long")
        if len(self._head) < max(end, _LENGTH_BYTES + 1):
            return b""
        fields = json.loads(self._head[_LENGTH_BYTES:end])
        tensors = {n: t for n, t in fields.items() if n.startswith(("model.", "lm_head."))}
        self._left = max(tensor["data_offsets"][1] for tensor in tensors.values())
        offset = self._left
        for name in _gains_of(tensors):
            ends = [offset, offset := offset + 4 * self._width]
            tensors[name] = {"dtype": "F32", "shape": [self._width], "data_offsets": ends}
        self.names = {n: t["data_offsets"][1] - t["data_offsets"][0] for n, t in tensors.items()}
        self._file.write(safetensors_head(tensors, {"format": "pt"}))
        return self._head[end:]


def _gains_of(tensors: dict[str, object]) -> list[str]:
    """The gains that Llama has beside these matrices and our model has not: they are one."""
    if EMBEDDING_NAME in tensors:
        return ["model.norm.weight"]
    layers = dict.fromkeys(name.split(".")[2] for name in tensors)
    return [
        f"model.layers.{layer}.{norm}.weight"
        for layer in layers
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]


def stage_file_name(stage: int, num_stages: int) -> str:
    """Return the name of a stage's file as Hugging Face numbers the parts of a model."""
    return f"model-{stage + 1:05d}-of-{num_stages + 1:05d}.safetensors"


def state_bytes(manifest: Manifest, stage: int) -> int:
    """Return the size of a stage's weights, fp32."""
    return 4 * stage_layout(manifest, stage).num_elements


def write_index(folder: Path, files: list[StageFile]) -> None:
    """Write which tensor lies in which file."""
    places = {name: file.path.name for file in files for name in file.names}
    total = sum(size for file in files for size in file.names.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_config(folder: Path, model: ModelSpec, separator: int) -> None:
    """Write config.json and generation_config.json; documents end with ``separator``."""
    ends = {"bos_token_id": separator, "eos_token_id": separator}
    config = {**llama_config(model), **ends}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {**ends, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_tokenizer(folder: Path, text: str, separator_name: str | None, context: int) -> None:
    """Write tokenizer.json as it is, and what AutoTokenizer needs beside it."""
    (folder / "tokenizer.json").write_bytes(text.encode())
    named = () if separator_name is None else ("bos_token", "eos_token")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(named, separator_name),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
