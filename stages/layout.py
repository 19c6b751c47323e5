"""Where each parameter of a stage lies in its flat fp32 buffer.

Parameters carry Hugging Face's Llama names, so that export renames nothing. A *leaf* is what
autograd sees: one parameter, or the query, key and value projections as one tall matrix, whose
single product is faster than three. Gate and up stay apart: their halves of one product would
have to be joined again in the backward pass, which costs more than it saves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from protocol.manifest import Manifest, ModelSpec

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True)
class Parameter:
    """A matrix [rows, columns]; ``is_residual`` if its product is added to the residual stream."""

    name: str
    rows: int
    columns: int
    is_residual: bool = False

    @property
    def num_elements(self) -> int:
        """Number of scalars."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Layout:
    """The parameters of a stage in the order of the flat buffer, grouped into leaves."""

    leaves: tuple[tuple[Parameter, ...], ...]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters in order."""
        return tuple(parameter for leaf in self.leaves for parameter in leaf)

    @cached_property
    def num_elements(self) -> int:
        """Length of the flat buffer."""
        return sum(parameter.num_elements for parameter in self.parameters)

    def leaf_views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return one matrix view of ``flat`` per leaf."""
        sizes = [sum(parameter.num_elements for parameter in leaf) for leaf in self.leaves]
        return [
            flat[end - size : end].view(-1, leaf[0].columns)
            for leaf, size, end in zip(self.leaves, sizes, accumulate(sizes), strict=True)
        ]

    def named_views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return one matrix view of ``flat`` per parameter name."""
        ends = accumulate(parameter.num_elements for parameter in self.parameters)
        return {
            p.name: flat[end - p.num_elements : end].view(p.rows, p.columns)
            for p, end in zip(self.parameters, ends, strict=True)
        }


def layer_leaves(model: ModelSpec, layer: int) -> tuple[tuple[Parameter, ...], ...]:
    """Return the five leaves of one transformer block: qkv, output, gate, up, down."""
    width, hidden, kv_width = model.width, model.feed_forward, model.kv_heads * model.head_width
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    return (
        (
            Parameter(f"{attention}.q_proj.weight", width, width),
            Parameter(f"{attention}.k_proj.weight", kv_width, width),
            Parameter(f"{attention}.v_proj.weight", kv_width, width),
        ),
        (Parameter(f"{attention}.o_proj.weight", width, width, is_residual=True),),
        (Parameter(f"{mlp}.gate_proj.weight", hidden, width),),
        (Parameter(f"{mlp}.up_proj.weight", hidden, width),),
        (Parameter(f"{mlp}.down_proj.weight", width, hidden, is_residual=True),),
    )


def stage_layout(manifest: Manifest, stage: int) -> Layout:
    """Return the layout of a stage: blocks for 1..S, embedding and head for 0."""
    model = manifest.model
    if stage == 0:
        embedding = Parameter(EMBEDDING_NAME, model.vocabulary, model.width)
        head = Parameter(HEAD_NAME, model.vocabulary, model.width)
        return Layout(((embedding,), (head,)))
    layers = manifest.pipeline.layers_of(stage, model.layers)
    return Layout(tuple(leaf for layer in layers for leaf in layer_leaves(model, layer)))


def safetensors_head(tensors: dict[str, object], metadata: dict[str, str]) -> bytes:
    """Return the length and the header of a safetensors file."""
    text = json.dumps({"__metadata__": metadata, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def initial_head(layout: Layout) -> bytes:
    """Return the header of a stage's weights file: safetensors, in the order of the layout."""
    tensors: dict[str, object] = {}
    end = 0
    for parameter in layout.parameters:
        first, end = end, end + 4 * parameter.num_elements
        shape = [parameter.rows, parameter.columns]
        tensors[parameter.name] = {"dtype": "F32", "shape": shape, "data_offsets": [first, end]}
    return safetensors_head(tensors, {"format": "pt"})
