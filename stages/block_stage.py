"""Stages 1..S: a run of transformer blocks, forward and backward for many microbatches at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocol.errors import ProtocolViolation
from protocol.manifest import Manifest
from stages.cache import BlockCache, cache_bytes
from stages.memory import kept_bytes
from stages.model import RotaryTable, rotary_table, run_blocks
from stages.pins import PinnedState
from stages.state import Tensor, TorchStageState, WeightGradient, WorkKey


@dataclass(frozen=True)
class _Work:
    """What backward needs: the input, and the output with its graph unless it is recomputed."""

    input_BTW: Tensor
    output_BTW: Tensor | None
    num_bytes: int


class TorchBlockStage(TorchStageState):
    """A run of blocks on one CPU thread's torch. Implements BlockStage.

    With ``recompute`` only the input is kept and backward runs the forward pass again: a third
    more work for a fraction of the memory, and the same gradients to the bit. Tensors handed in
    belong to the stage: the caller must not change them.
    """

    def __init__(
        self, manifest: Manifest, stage: int, *, recompute: bool = False, device: str = "cpu"
    ) -> None:
        super().__init__(manifest, stage, device)
        self._manifest = manifest
        self._recompute = recompute
        self._rotary = RotaryTable(
            *(part.to(self._device) for part in rotary_table(manifest.model))
        )
        self._work: dict[WorkKey, _Work] = {}

    def forward(self, key: WorkKey, h_BTW: Tensor, *, keep: bool) -> Tensor:
        """Return the stage's output; keep what backward needs under ``key`` if asked.

        Raises NonFinite or ProtocolViolation for an input that no neighbour should send.
        """
        input_BTW = self._received(h_BTW, "forward").detach().requires_grad_(keep)
        with torch.set_grad_enabled(keep and not self._recompute):
            output_BTW = self._run(input_BTW)
        if keep:
            batch, num_tokens, _ = input_BTW.shape
            num_bytes = kept_bytes(
                self._manifest, self.stage, batch * num_tokens, recompute=self._recompute
            )
            graph = None if self._recompute else output_BTW
            self._work[key] = _Work(input_BTW, graph, num_bytes)
        return self._sent(output_BTW)

    def backward(self, key: WorkKey, g_BTW: Tensor) -> Tensor:
        """Return the gradient by the input; keep the weight gradient apart under ``key``.

        Raises KeyError if ``forward`` kept nothing, NonFinite or ProtocolViolation for a
        gradient that no neighbour should send; the kept graph then stays.
        """
        work = self._work[key]
        gradient_BTW = self._received(g_BTW, "backward")
        if gradient_BTW.shape != work.input_BTW.shape:
            raise ProtocolViolation(f"the gradient {tuple(g_BTW.shape)} is not of its output")
        del self._work[key]
        output_BTW = work.output_BTW
        with torch.enable_grad():
            if output_BTW is None:
                output_BTW = self._run(work.input_BTW)
        leaves = self._current.leaves
        by_input, *by_leaves = torch.autograd.grad(
            output_BTW, (work.input_BTW, *leaves), gradient_BTW
        )
        self._gradients[key] = WeightGradient(dense=dict(enumerate(by_leaves)))
        return self._sent(by_input)

    def cache_bytes(self, num_positions: int) -> int:
        """Return the memory of a cache for one sequence of so many tokens."""
        num_layers = len(self._manifest.pipeline.layers_of(self.stage, self._model.layers))
        return cache_bytes(self._model, num_layers, num_positions)

    def open_cache(self, pin: PinnedState, num_positions: int) -> BlockCache:
        """Begin a sequence under pinned weights."""
        return BlockCache(pin, self._model, self._rotary, num_positions)

    def extend(self, cache: BlockCache, h_BTW: Tensor) -> Tensor:
        """Return the output [1, T, W] for the tokens that follow those in the cache.

        Raises NonFinite or ProtocolViolation for an input that no neighbour should send.
        """
        input_BTW = self._received(h_BTW, "forward")
        if len(input_BTW) != 1:
            raise ProtocolViolation(f"{len(input_BTW)} sequences for one cache")
        return self._sent(cache.extend(input_BTW))

    def _run(self, h_BTW: Tensor) -> Tensor:
        return run_blocks(h_BTW, self._current.leaves, self._model, self._rotary)

    def _work_bytes(self) -> int:
        return sum(work.num_bytes for work in list(self._work.values()))

    def _drop_work(self, key: WorkKey) -> None:
        self._work.pop(key, None)

    def _drop_all_work(self) -> None:
        self._work.clear()
