"""The whole model as one function of a dict of tensors under Hugging Face's Llama names.

Shapes: B sequences, T tokens, W width, H heads, K KV heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Weights = dict[str, Tensor]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Shape:
    """What the manifest's [model] table says about the model's size."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Shape:
        """Read the fields that matter here from a manifest's [model] table."""
        return cls(**{k: v for k, v in table.items() if k in cls.__dataclass_fields__})

    @property
    def head_width(self) -> int:
        """D."""
        return self.width // self.heads


def layer_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """Names inside one layer, with [rows, columns], in the order of Hugging Face's module."""
    kv_width = shape.kv_heads * shape.head_width
    return {
        "self_attn.q_proj.weight": (shape.width, shape.width),
        "self_attn.k_proj.weight": (kv_width, shape.width),
        "self_attn.v_proj.weight": (kv_width, shape.width),
        "self_attn.o_proj.weight": (shape.width, shape.width),
        "mlp.gate_proj.weight": (shape.feed_forward, shape.width),
        "mlp.up_proj.weight": (shape.feed_forward, shape.width),
        "mlp.down_proj.weight": (shape.width, shape.feed_forward),
    }


def rotation(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each [T, D]."""
    exponent_E = torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width
    angle_TE = torch.outer(torch.arange(shape.context).float(), shape.rope_base**-exponent_E)
    angle_TD = torch.cat([angle_TE, angle_TE], dim=-1)
    return angle_TD.cos(), angle_TD.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (i, i + D/2) by the angle of its position."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat([-second, first], dim=-1) * sin_TD


def normalise(x_BTW: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm without a gain."""
    return x_BTW * torch.rsqrt(x_BTW.square().mean(-1, keepdim=True) + epsilon)


def attend(weights: Weights, prefix: str, x_BTW: Tensor, shape: Shape, turn: tuple) -> Tensor:
    """Causal grouped-query attention."""
    batch, length, _ = x_BTW.shape

    def project(name: str, heads: int) -> Tensor:
        flat = F.linear(x_BTW, weights[f"{prefix}self_attn.{name}.weight"])
        return flat.view(batch, length, heads, shape.head_width).transpose(1, 2)

    cos_TD, sin_TD = turn[0][:length], turn[1][:length]
    q_BHTD = rotate(project("q_proj", shape.heads), cos_TD, sin_TD)
    k_BKTD = rotate(project("k_proj", shape.kv_heads), cos_TD, sin_TD)
    v_BKTD = project("v_proj", shape.kv_heads)
    share = shape.heads // shape.kv_heads
    if share > 1:
        k_BKTD, v_BKTD = (t.repeat_interleave(share, dim=1) for t in (k_BKTD, v_BKTD))
    out_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True)
    out_BTW = out_BHTD.transpose(1, 2).reshape(batch, length, shape.width)
    return F.linear(out_BTW, weights[f"{prefix}self_attn.o_proj.weight"])


def feed_forward(weights: Weights, prefix: str, x_BTW: Tensor) -> Tensor:
    """SwiGLU."""
    gate = F.silu(F.linear(x_BTW, weights[f"{prefix}mlp.gate_proj.weight"]))
    up = F.linear(x_BTW, weights[f"{prefix}mlp.up_proj.weight"])
    return F.linear(gate * up, weights[f"{prefix}mlp.down_proj.weight"])


def logits(weights: Weights, tokens_BT: Tensor, shape: Shape) -> Tensor:
    """The model's output [B, T, V]."""
    turn = rotation(shape)
    h_BTW = F.embedding(tokens_BT, weights[EMBEDDING])
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        h_BTW = h_BTW + attend(weights, prefix, normalise(h_BTW, shape.norm_epsilon), shape, turn)
        h_BTW = h_BTW + feed_forward(weights, prefix, normalise(h_BTW, shape.norm_epsilon))
    return F.linear(normalise(h_BTW, shape.norm_epsilon), weights[HEAD])


def mean_loss(weights: Weights, window_BU: Tensor, shape: Shape) -> Tensor:
    """Mean cross-entropy in nats of predicting each next token; ``window_BU``: [B, T + 1]."""
    out_BTV = logits(weights, window_BU[:, :-1], shape)
    return F.cross_entropy(out_BTV.flatten(0, 1), window_BU[:, 1:].flatten())
