"""The toy model as stages of a swarm: real losses and weights at microseconds a piece."""

from __future__ import annotations

import torch

from protocol.manifest import Manifest
from protocol.ports import Tensor, WorkKey
from protocol.simulation import toy_math
from protocol.simulation.counted_stage import (
    CountedCache,
    CountedPin,
    CountedStage,
    slot_of,
    with_slot,
)


class ToyBlockStage(CountedStage):
    """Stages 1..S."""

    def __init__(self, manifest: Manifest, stage: int) -> None:
        super().__init__(manifest, stage, toy_math.initial_weights(manifest, stage))
        self._inputs: dict[WorkKey, Tensor] = {}

    def forward(self, key: WorkKey, h_BTW: Tensor, *, keep: bool) -> Tensor:
        """Return the stage's output [B, T, W]; keep the input if asked."""
        if keep:
            self._inputs[key] = h_BTW.clone()
        y_BTC = toy_math.block_forward(self._state.weights_P, h_BTW[..., :-1].double())
        return with_slot(y_BTC, slot_of(h_BTW))

    def extend(self, cache: CountedCache, h_BTW: Tensor) -> Tensor:
        """Return the output [1, T, W] of the tokens that follow, by the pinned weights."""
        cache.advance(h_BTW.shape[1])
        y_BTC = toy_math.block_forward(cache.pin.state.weights_P, h_BTW[..., :-1].double())
        return with_slot(y_BTC, 0)

    def backward(self, key: WorkKey, g_BTW: Tensor) -> Tensor:
        """Return the input gradient [B, T, W]; the weight gradient is kept apart."""
        h_BTW = self._inputs.pop(key)
        slot = slot_of(h_BTW)
        assert slot_of(g_BTW) == slot, "a gradient met another microbatch's activation"
        g_BTC, by_weights_P = toy_math.block_backward(
            self._state.weights_P, h_BTW[..., :-1].double(), g_BTW[..., :-1].double()
        )
        self._keep(key, slot, toy_math.on_grid(by_weights_P))
        return with_slot(g_BTC, slot)

    def _forget(self, key: WorkKey) -> None:
        self._inputs.pop(key, None)

    def _forget_all(self) -> None:
        self._inputs.clear()


class ToyEdgeStage(CountedStage):
    """Stage 0."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest, 0, toy_math.initial_weights(manifest, 0))
        self._drawn: dict[WorkKey, tuple[Tensor, Tensor, int]] = {}
        self._by_head: dict[WorkKey, Tensor] = {}

    def embed(self, key: WorkKey, step: int, slot: int) -> Tensor:
        """Draw and embed a microbatch [B, T, W]."""
        x_BTC, target_BTC = toy_math.draw(self.manifest, step, slot)
        self._drawn[key] = x_BTC, target_BTC, slot
        return with_slot(toy_math.embed(self._state.weights_P, x_BTC), slot)

    def embed_validation(self, key: WorkKey, index: int) -> Tensor:
        """Draw and embed a held-out microbatch [B, T, W]."""
        return self.embed(key, -1, index)

    def embed_tokens(self, pin: CountedPin, tokens_BT: Tensor) -> Tensor:
        """Embed tokens as numbers in 0..1, the same in every channel [B, T, W]."""
        model = self.manifest.model
        x_BT1 = tokens_BT.double().unsqueeze(-1) / model.vocabulary
        x_BTC = x_BT1.expand(-1, -1, model.width - 1)
        return with_slot(toy_math.embed(pin.state.weights_P, x_BTC), 0)

    def logits(self, pin: CountedPin, h_BTW: Tensor) -> Tensor:
        """Return logits [B, V] that favour the token nearest to the mean prediction."""
        u_C = pin.state.weights_P.chunk(2)[1]
        predicted_B1 = (u_C * h_BTW[:, -1, :-1].double()).mean(-1, keepdim=True)
        vocabulary = self.manifest.model.vocabulary
        return -(torch.arange(vocabulary) / vocabulary - predicted_B1).abs().float()

    def loss(self, key: WorkKey, h_BTW: Tensor) -> float:
        """Return the loss and forget the microbatch."""
        _, target_BTC, _ = self._drawn.pop(key)
        return toy_math.head(self._state.weights_P, h_BTW[..., :-1].double(), target_BTC)[0]

    def loss_and_gradient(self, key: WorkKey, h_BTW: Tensor) -> tuple[float, Tensor]:
        """Return the loss and its gradient [B, T, W] by the last stage's output."""
        _, target_BTC, slot = self._drawn[key]
        assert slot_of(h_BTW) == slot, "an activation came back under another microbatch's name"
        h_BTC = h_BTW[..., :-1].double()
        loss, g_BTC, by_head_C = toy_math.head(self._state.weights_P, h_BTC, target_BTC)
        self._by_head[key] = by_head_C
        return loss, with_slot(g_BTC, slot)

    def embed_backward(self, key: WorkKey, g_BTW: Tensor) -> None:
        """Finish the microbatch's gradient."""
        x_BTC, _, slot = self._drawn.pop(key)
        by_embedding_C = toy_math.embed_backward(x_BTC, g_BTW[..., :-1].double())
        gradient_P = torch.cat((by_embedding_C, self._by_head.pop(key)))
        self._keep(key, slot, toy_math.on_grid(gradient_P))

    def _forget(self, key: WorkKey) -> None:
        self._drawn.pop(key, None)
        self._by_head.pop(key, None)

    def _forget_all(self) -> None:
        self._drawn.clear()
        self._by_head.clear()


def toy_stage(manifest: Manifest, stage: int) -> ToyBlockStage | ToyEdgeStage:
    """Return stage 0 or a block stage at step 0."""
    return ToyBlockStage(manifest, stage) if stage else ToyEdgeStage(manifest)
