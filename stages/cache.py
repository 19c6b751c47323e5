"""Keys and values of the tokens so far, so that the next token costs one token's work.

Shape suffixes are those of ``stages.model``; P is the positions that there is room for, U the new
tokens. One sequence: B is 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from protocol.errors import ProtocolViolation
from protocol.manifest import ModelSpec
from stages.model import LEAVES_PER_LAYER, RotaryTable, feed_forward, norm, rotate
from stages.pins import PinnedState

Tensor = torch.Tensor


def cache_bytes(model: ModelSpec, num_layers: int, num_positions: int) -> int:
    """Return the memory of a cache: keys and values of every layer, fp32."""
    return 4 * 2 * num_layers * model.kv_heads * model.head_width * num_positions


class BlockCache:
    """One sequence's keys and values at one stage, under pinned weights."""

    def __init__(
        self, pin: PinnedState, model: ModelSpec, table: RotaryTable, num_positions: int
    ) -> None:
        self._pin, self._model, self._table = pin, model, table
        self._room = num_positions
        num_layers = len(pin.leaves) // LEAVES_PER_LAYER
        self._kept = torch.empty(
            num_layers, 2, 1, model.kv_heads, num_positions, model.head_width,
            device=pin.leaves[0].device,
        )  # fmt: skip
        self.num_tokens = 0

    @torch.no_grad()
    def extend(self, h_BUW: Tensor) -> Tensor:
        """Return the stage's output [1, U, W] for the tokens that follow those so far.

        Raises ProtocolViolation if there is no room for them.
        """
        if self.num_tokens + h_BUW.shape[1] > self._room:
            raise ProtocolViolation(f"more than {self._room} tokens for one cache")
        leaves = self._pin.leaves
        for layer in range(len(self._kept)):
            qkv, output, gate, up, down = leaves[LEAVES_PER_LAYER * layer :][:LEAVES_PER_LAYER]
            mixed_BUW = self._attend(layer, norm(h_BUW, self._model), qkv)
            h_BUW = h_BUW + F.linear(mixed_BUW, output)
            h_BUW = h_BUW + feed_forward(norm(h_BUW, self._model), gate, up, down)
        self.num_tokens += h_BUW.shape[1]
        return h_BUW

    def _attend(self, layer: int, x_BUW: Tensor, qkv_GDW: Tensor) -> Tensor:
        """Attention of the new tokens over all, before the output projection."""
        model, first = self._model, self.num_tokens
        end = first + x_BUW.shape[1]
        heads, kv_heads = model.heads, model.kv_heads
        qkv_BUGD = F.linear(x_BUW, qkv_GDW).view(*x_BUW.shape[:2], -1, model.head_width)
        qk_BUGD, v_BUKD = torch.split_with_sizes(qkv_BUGD, (heads + kv_heads, kv_heads), dim=2)
        q_BUHD, k_BUKD = torch.split_with_sizes(
            rotate(qk_BUGD, self._table.between(first, end)), (heads, kv_heads), dim=2
        )
        keys_BKPD, values_BKPD = self._kept[layer]
        keys_BKPD[:, :, first:end] = k_BUKD.transpose(1, 2)
        values_BKPD[:, :, first:end] = v_BUKD.transpose(1, 2)
        position_P = torch.arange(end, device=x_BUW.device)
        mixed_BHUD = F.scaled_dot_product_attention(
            q_BUHD.transpose(1, 2),
            keys_BKPD[:, :, :end],
            values_BKPD[:, :, :end],
            attn_mask=position_P <= position_P[first:, None],
            enable_gqa=heads != kv_heads,
        )
        return mixed_BHUD.transpose(1, 2).flatten(2)
