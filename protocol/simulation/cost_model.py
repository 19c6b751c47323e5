"""Stages without mathematics, for big swarms: what they cost is modelled, what they count is real.

Boundary tensors hold one number, the slot; ``CostModel`` says what the real ones would weigh and
how long the real work would take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from protocol.manifest import Manifest
from protocol.messages import Backward, Boundary, Forward, Message, ReducePart, ReduceResult
from protocol.ports import JobKind, Tensor, WorkKey
from protocol.simulation.counted_stage import (
    CountedCache,
    CountedPin,
    CountedStage,
    slot_of,
    with_slot,
)

_OPTIMIZER_FLOPS_PER_WEIGHT = 20


@dataclass(frozen=True)
class CostModel:
    """Bytes and seconds of the manifest's model on a computer of ``flops_per_s``."""

    manifest: Manifest
    flops_per_s: float = 50e9

    @property
    def stage_weights(self) -> float:
        """The mean number of weights of stages 1..S."""
        m = self.manifest.model
        kv_width = m.kv_heads * m.head_width
        layer = 2 * m.width * (m.width + kv_width) + 3 * m.width * m.feed_forward
        return layer * m.layers / self.manifest.num_stages

    @property
    def boundary_bytes(self) -> int:
        """The size of an activation or gradient between stages."""
        itemsize = 4 if self.manifest.pipeline.wire_dtype == "float32" else 2
        model = self.manifest.model
        return self.manifest.training.microbatch * model.context * model.width * itemsize

    def seconds(self) -> Mapping[JobKind, float]:
        """Return the duration of each kind of job (2 flops per weight and token, forward)."""
        model, training = self.manifest.model, self.manifest.training
        tokens = training.microbatch * model.context
        forward_s = 2 * self.stage_weights * tokens / self.flops_per_s
        edge_s = 2 * model.vocabulary * model.width * tokens / self.flops_per_s
        update_s = _OPTIMIZER_FLOPS_PER_WEIGHT * self.stage_weights / self.flops_per_s
        return {
            "forward": forward_s, "backward": 2 * forward_s, "edge": edge_s,
            "embed": edge_s / 4,
            "commit": update_s / 20, "update": update_s, "state": update_s,
        }  # fmt: skip

    def size_of(self, message: Message, tensors: Sequence[Tensor]) -> int:
        """Return the bytes of the real tensors behind the small ones of a message."""
        if not tensors:
            return 0
        if isinstance(message, Forward | Backward | Boundary):
            return self.boundary_bytes
        if isinstance(message, ReducePart | ReduceResult):
            share = tensors[0].numel() / self.manifest.training.quota
            return int(share * self.stage_weights * 4)
        return int(self.stage_weights * 12)  # weights and two moments of a state


class CostModelStage(CountedStage):
    """Any stage: as a block stage it hands the slot on, as stage 0 it draws it."""

    def __init__(self, manifest: Manifest, stage: int) -> None:
        super().__init__(manifest, stage, torch.zeros(0, dtype=torch.float64))
        self._slots: dict[WorkKey, int] = {}

    def forward(self, key: WorkKey, h_BTW: Tensor, *, keep: bool) -> Tensor:
        """Hand the slot on."""
        if keep:
            self._slots[key] = slot_of(h_BTW)
        return h_BTW.clone()

    def backward(self, key: WorkKey, g_BTW: Tensor) -> Tensor:
        """Count the slot."""
        slot = self._slots.pop(key)
        assert slot_of(g_BTW) == slot, "a gradient met another microbatch's activation"
        self._keep(key, slot, torch.zeros(0))
        return g_BTW.clone()

    def embed(self, key: WorkKey, step: int, slot: int) -> Tensor:
        """Return a tensor [1, 1, 1] with the slot."""
        self._slots[key] = slot
        return with_slot(torch.zeros(1, 1, 0), slot)

    def embed_validation(self, key: WorkKey, index: int) -> Tensor:
        """The same for held-out data."""
        return self.embed(key, -1, index)

    def extend(self, cache: CountedCache, h_BTW: Tensor) -> Tensor:
        """Hand on as many tokens."""
        cache.advance(h_BTW.shape[1])
        return h_BTW.clone()

    def embed_tokens(self, pin: CountedPin, tokens_BT: Tensor) -> Tensor:
        """Return a tensor [B, T, 1] of slot 0."""
        return torch.zeros(*tokens_BT.shape, 1)

    def logits(self, pin: CountedPin, h_BTW: Tensor) -> Tensor:
        """Return logits [B, V] without preference."""
        return torch.zeros(len(h_BTW), self.manifest.model.vocabulary)

    def loss(self, key: WorkKey, h_BTW: Tensor) -> float:
        """Return a loss that falls with the steps taken."""
        self._slots.pop(key)
        return 1.0 / (1 + self.step)

    def loss_and_gradient(self, key: WorkKey, h_BTW: Tensor) -> tuple[float, Tensor]:
        """Return such a loss and the slot."""
        assert slot_of(h_BTW) == self._slots[key], "an activation came back under another's name"
        return 1.0 / (1 + self.step), h_BTW.clone()

    def embed_backward(self, key: WorkKey, g_BTW: Tensor) -> None:
        """Count the slot."""
        self.backward(key, g_BTW)

    def _forget(self, key: WorkKey) -> None:
        self._slots.pop(key, None)

    def _forget_all(self) -> None:
        self._slots.clear()
