"""Small manifests, token sources and gradients for the tests of stages/."""

from __future__ import annotations

from typing import Any

import torch

from protocol.keys import NodeKey
from protocol.manifest import Manifest
from stages import TorchBlockStage, TorchEdgeStage

Tables = dict[str, Any]


def make_manifest(**changes: Tables) -> Manifest:
    """A model of 4 layers and width 32 in 2 stages; tables given are laid over the defaults."""
    tables: Tables = {
        "name": "test",
        "organiser": NodeKey(bytes(32)).peer_id,
        "model": {"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48,
                  "vocabulary": 257, "context": 12},
        "pipeline": {"stages": 2},
        "training": {"steps": 50, "quota": 4, "microbatch": 3, "seed": 5},
        "data": {"seed": 7},
    }  # fmt: skip
    for name, table in changes.items():
        tables[name] = {**tables[name], **table}
    return Manifest.model_validate(tables)


class RandomTokens:
    """Uniform tokens that depend on (step, slot) alone."""

    def __init__(self, manifest: Manifest) -> None:
        self.size = (manifest.training.microbatch, manifest.model.context + 1)
        self.vocabulary = manifest.model.vocabulary

    def draw(self, step: int, slot: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + slot)
        return torch.randint(self.vocabulary, self.size, generator=generator)

    def validation(self, index: int) -> torch.Tensor:
        return self.draw(999, index)


def make_edge(manifest: Manifest) -> TorchEdgeStage:
    return TorchEdgeStage(manifest, RandomTokens(manifest))


def make_blocks(manifest: Manifest) -> list[TorchBlockStage]:
    return [TorchBlockStage(manifest, k) for k in range(1, manifest.num_stages + 1)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_microbatch(
    edge: TorchEdgeStage, blocks: list[TorchBlockStage], step: int, slot: int, group: str = "d"
) -> float:
    """Drive one microbatch through all stages and back, and commit it everywhere."""
    key = (step, slot)
    h = edge.embed(key, step, slot)
    for block in blocks:
        h = block.forward(key, h, keep=True)
    loss, g = edge.loss_and_gradient(key, h)
    for block in reversed(blocks):
        g = block.backward(key, g)
    edge.embed_backward(key, g)
    for stage in (edge, *blocks):
        stage.commit(key, group)
    return loss
