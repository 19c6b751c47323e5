"""Stage 0, the data node: draws text, embeds it, and computes head and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from protocol.errors import ProtocolViolation
from protocol.manifest import Manifest
from stages.model import head_logits, head_loss
from stages.pins import PinnedState
from stages.state import Tensor, TorchStageState, WeightGradient, WorkKey

_EMBEDDING, _HEAD = 0, 1


class TokenSource(Protocol):
    """Where the data node's windows of tokens come from: ``stages.data.Corpus``."""

    def draw(self, step: int, slot: int) -> Tensor:
        """Return the int64 window [B, T + 1] of a training microbatch."""
        ...

    def validation(self, index: int) -> Tensor:
        """Return the int64 window [B, T + 1] of a held-out microbatch."""
        ...


@dataclass(frozen=True)
class _Work:
    """One microbatch's tokens and the tokens that follow them; neither leaves this computer."""

    tokens_BT: Tensor
    targets_BT: Tensor


class TorchEdgeStage(TorchStageState):
    """Embedding, final norm, untied head and loss. Implements EdgeStage."""

    def __init__(self, manifest: Manifest, source: TokenSource, *, device: str = "cpu") -> None:
        super().__init__(manifest, 0, device)
        self._source = source
        self._work: dict[WorkKey, _Work] = {}

    def embed(self, key: WorkKey, step: int, slot: int) -> Tensor:
        """Draw the microbatch of (seed, step, slot), embed it, keep its targets under ``key``."""
        return self._embed_window(key, self._source.draw(step, slot))

    def embed_validation(self, key: WorkKey, index: int) -> Tensor:
        """The same for the ``index``-th held-out microbatch."""
        return self._embed_window(key, self._source.validation(index))

    def embed_tokens(self, pin: PinnedState, tokens_BT: Tensor) -> Tensor:
        """Embed tokens with pinned weights, for generation; nothing is kept."""
        return self._embed(pin.leaves, tokens_BT.to(self._device))

    def logits(self, pin: PinnedState, h_BTW: Tensor) -> Tensor:
        """Return the fp32 logits [B, V] of the token after the last one, for generation."""
        last_B1W = self._received(h_BTW, "forward")[:, -1:]
        with torch.no_grad():
            return head_logits(last_B1W, pin.leaves[_HEAD], self._model)[:, 0].cpu()

    def loss(self, key: WorkKey, h_BTW: Tensor) -> float:
        """The mean loss of the microbatch, without gradients; drops the key."""
        work = self._work[key]
        h_BTW = self._received_output(work, h_BTW)
        del self._work[key]
        with torch.no_grad():
            return float(self._loss(h_BTW, work))

    def loss_and_gradient(self, key: WorkKey, h_BTW: Tensor) -> tuple[float, Tensor]:
        """The mean loss and its gradient by ``h_BTW``; keeps the head's weight gradient."""
        work = self._work[key]
        h_BTW = self._received_output(work, h_BTW).detach().requires_grad_()
        with torch.enable_grad():
            loss = self._loss(h_BTW, work)
        by_input, by_head = torch.autograd.grad(loss, (h_BTW, self._current.leaves[_HEAD]))
        self._gradients[key] = WeightGradient(dense={_HEAD: by_head})
        return float(loss.detach()), self._sent(by_input)

    def embed_backward(self, key: WorkKey, g_BTW: Tensor) -> None:
        """Add the embedding's gradient to what is kept under ``key``.

        Raises KeyError before ``loss_and_gradient`` or when called twice.
        """
        gradient, work = self._gradients[key], self._work[key]
        values_BTW = self._received(g_BTW, "backward")
        if values_BTW.shape[:2] != work.tokens_BT.shape:
            raise ProtocolViolation(f"the gradient {tuple(g_BTW.shape)} is not of its embedding")
        del self._work[key]
        # Rows, not a matrix: a microbatch touches few of a large vocabulary's tokens.
        gradient.rows[_EMBEDDING] = (work.tokens_BT.flatten(), values_BTW.flatten(0, 1))

    def _embed_window(self, key: WorkKey, window_BU: Tensor) -> Tensor:
        window_BU = window_BU.to(self._device)
        work = _Work(window_BU[:, :-1], window_BU[:, 1:])
        self._gradients.pop(key, None)
        self._work[key] = work
        return self._embed(self._current.leaves, work.tokens_BT)

    @torch.no_grad()
    def _embed(self, leaves: Sequence[Tensor], tokens_BT: Tensor) -> Tensor:
        return self._sent(F.embedding(tokens_BT, leaves[_EMBEDDING]))

    def _received_output(self, work: _Work, h_BTW: Tensor) -> Tensor:
        h_BTW = self._received(h_BTW, "forward")
        if h_BTW.shape[:2] != work.tokens_BT.shape:
            raise ProtocolViolation(f"the activation {tuple(h_BTW.shape)} is not of its tokens")
        return h_BTW

    def _loss(self, h_BTW: Tensor, work: _Work) -> Tensor:
        return head_loss(h_BTW, self._current.leaves[_HEAD], work.targets_BT, self._model)

    def _take_gradient(self, key: WorkKey) -> WeightGradient:
        # Until embed_backward, the microbatch's gradient is half of one: nothing to commit.
        if _EMBEDDING not in self._gradients[key].rows:
            raise KeyError(key)
        return super()._take_gradient(key)

    def _work_bytes(self) -> int:
        return sum(w.tokens_BT.nbytes + w.targets_BT.nbytes for w in list(self._work.values()))

    def _drop_work(self, key: WorkKey) -> None:
        self._work.pop(key, None)

    def _drop_all_work(self) -> None:
        self._work.clear()
