"""Where a run starts and what it reads: initial weights, and text by (seed, step, slot).

Both follow the recipes that ``stages/initialisation.py`` and ``stages/data.py`` document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reference.model import EMBEDDING, HEAD, Shape, Tensor, Weights, layer_shapes

STD = 0.02
RESIDUAL = ("o_proj.weight", "down_proj.weight")


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """[rows, columns] of every parameter by name."""
    found = {EMBEDDING: (shape.vocabulary, shape.width)}
    for layer in range(shape.layers):
        for name, size in layer_shapes(shape).items():
            found[f"model.layers.{layer}.{name}"] = size
    return {**found, HEAD: (shape.vocabulary, shape.width)}


def initial_weights(manifest: Mapping[str, Any]) -> Weights:
    """The whole model at step 0."""
    shape, seed = Shape.of(manifest["model"]), manifest["training"]["seed"]
    weights = {}
    for name, size in parameter_shapes(shape).items():
        key = int.from_bytes(sha256(f"shoal/init/{seed}/{name}".encode()).digest()[:16], "little")
        std = STD / math.sqrt(2 * shape.layers) if name.endswith(RESIDUAL) else STD
        normal = np.random.Generator(np.random.Philox(key=key)).standard_normal(size)
        weights[name] = torch.from_numpy((normal * std).astype(np.float32))
    return weights


def documents_in(folder: Path) -> list[bytes]:
    """The files of a flat folder in order of their names."""
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def hash_number(text: bytes) -> int:
    """The first eight bytes of SHA-256, big-endian."""
    return int.from_bytes(sha256(text).digest()[:8], "big")


class Text:
    """Training text as one row of byte tokens; all data nodes of a test read the same."""

    def __init__(self, manifest: Mapping[str, Any], documents: Sequence[bytes]) -> None:
        if len(documents) < 20:
            raise ValueError("fewer than 20 documents would be cut into pieces first")
        self._seed = manifest["data"]["seed"]
        self._rows = manifest["training"]["microbatch"]
        self._length = manifest["model"]["context"]
        separator = 256 if manifest["model"]["vocabulary"] > 256 else 0
        kept = self._training_part(documents, manifest["data"]["validation_fraction"])
        self._tokens = np.concatenate([[*document, separator] for document in kept])

    def draw(self, data_node: str, step: int, slot: int) -> Tensor:
        """The window [B, T + 1] of one microbatch; ``data_node`` makes no difference here."""
        del data_node
        choices = len(self._tokens) - self._length
        starts = [
            hash_number(f"{self._seed}/{step}/{slot}/{row}".encode()) % choices
            for row in range(self._rows)
        ]
        rows = [self._tokens[start : start + self._length + 1] for start in starts]
        return torch.tensor(np.stack(rows), dtype=torch.int64)

    def _training_part(self, documents: Sequence[bytes], fraction: float) -> list[bytes]:
        if not fraction:
            return list(documents)
        marks = [hash_number(f"{self._seed}/".encode() + document) for document in documents]
        held = [mark / 2**64 < fraction for mark in marks]
        if not any(held):
            held[marks.index(min(marks))] = True
        if all(held):
            held[marks.index(max(marks))] = False
        return [d for d, is_held in zip(documents, held, strict=True) if not is_held]
