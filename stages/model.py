"""The Llama block without gains: functions of activations and weight matrices.

Shape suffixes: B sequences, T tokens, W width, H query heads, K key/value heads, G heads of one
position (H query + K key + K value), D head width, E half of D, F hidden width, V vocabulary,
N = B*T.

Norms carry no gain (a gain can be folded into the matrix that follows it), there are no biases,
and rotary positions pair channel i with i + D/2, as in Hugging Face's Llama.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  the name that every reader of torch expects

from protocol.manifest import ModelSpec

Tensor = torch.Tensor
LEAVES_PER_LAYER = 5


class RotaryTable(NamedTuple):
    """Cosine and sine of every position's angles, [T, 1, E], for the whole context."""

    cos_T1E: Tensor
    sin_T1E: Tensor

    def between(self, first: int, end: int) -> RotaryTable:
        """The positions ``first`` .. ``end`` - 1."""
        return RotaryTable(self.cos_T1E[first:end], self.sin_T1E[first:end])


def rotary_table(model: ModelSpec) -> RotaryTable:
    """Precompute the angles t * base^(-2e/D) in fp32."""
    exponent_E = torch.arange(0, model.head_width, 2, dtype=torch.float32) / model.head_width
    frequency_E = 1.0 / model.rope_base**exponent_E
    angle_TE = torch.outer(torch.arange(model.context, dtype=torch.float32), frequency_E)
    return RotaryTable(angle_TE.cos()[:, None], angle_TE.sin()[:, None])


def rotate(x_BTGD: Tensor, table: RotaryTable) -> Tensor:
    """Turn the pairs (i, i + D/2) of every head by the angle of its position."""
    num_tokens = x_BTGD.shape[1]
    cos_T1E, sin_T1E = table.cos_T1E[:num_tokens], table.sin_T1E[:num_tokens]
    first_BTGE, second_BTGE = x_BTGD.chunk(2, dim=-1)
    turned_first = first_BTGE * cos_T1E - second_BTGE * sin_T1E
    turned_second = second_BTGE * cos_T1E + first_BTGE * sin_T1E
    return torch.cat((turned_first, turned_second), dim=-1)


def attend(x_BTW: Tensor, qkv_GDW: Tensor, model: ModelSpec, table: RotaryTable) -> Tensor:
    """Causal grouped-query attention over normed activations, before the output projection."""
    heads, kv_heads = model.heads, model.kv_heads
    qkv_BTGD = F.linear(x_BTW, qkv_GDW).view(*x_BTW.shape[:2], -1, model.head_width)
    qk_BTGD, v_BTKD = torch.split_with_sizes(qkv_BTGD, (heads + kv_heads, kv_heads), dim=2)
    q_BTHD, k_BTKD = torch.split_with_sizes(rotate(qk_BTGD, table), (heads, kv_heads), dim=2)
    mixed_BHTD = F.scaled_dot_product_attention(
        q_BTHD.transpose(1, 2),
        k_BTKD.transpose(1, 2),
        v_BTKD.transpose(1, 2),
        is_causal=True,
        enable_gqa=heads != kv_heads,
    )
    return mixed_BHTD.transpose(1, 2).flatten(2)


def feed_forward(x_BTW: Tensor, gate_FW: Tensor, up_FW: Tensor, down_WF: Tensor) -> Tensor:
    """SwiGLU: down(silu(gate x) * up x)."""
    return F.linear(F.silu(F.linear(x_BTW, gate_FW)) * F.linear(x_BTW, up_FW), down_WF)


def norm(h_BTW: Tensor, model: ModelSpec) -> Tensor:
    """Root-mean-square norm over the width, without a gain."""
    return F.rms_norm(h_BTW, (model.width,), eps=model.norm_epsilon)


def run_blocks(
    h_BTW: Tensor, leaves: Sequence[Tensor], model: ModelSpec, table: RotaryTable
) -> Tensor:
    """Run consecutive blocks; ``leaves`` holds qkv, output, gate, up and down of each."""
    for first in range(0, len(leaves), LEAVES_PER_LAYER):
        qkv, output, gate, up, down = leaves[first : first + LEAVES_PER_LAYER]
        h_BTW = h_BTW + F.linear(attend(norm(h_BTW, model), qkv, model, table), output)
        h_BTW = h_BTW + feed_forward(norm(h_BTW, model), gate, up, down)
    return h_BTW


def head_logits(h_BTW: Tensor, head_VW: Tensor, model: ModelSpec) -> Tensor:
    """Return the logits [B, T, V] of the final norm and the untied head."""
    return F.linear(norm(h_BTW, model), head_VW)


def head_loss(h_BTW: Tensor, head_VW: Tensor, targets_BT: Tensor, model: ModelSpec) -> Tensor:
    """Return the mean cross-entropy of all tokens, in nats."""
    logits_NV = head_logits(h_BTW, head_VW, model).flatten(0, 1)
    return F.cross_entropy(logits_NV, targets_BT.flatten())
