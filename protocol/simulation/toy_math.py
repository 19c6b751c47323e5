"""The toy model's mathematics: pure functions on fp64, a few numbers wide.

Stage k: y = x + tanh(w * x + b). Edge: h = e * x, prediction u * h, squared error. Shape suffixes:
B microbatch, T context, C channels (width - 1: the last one carries the slot), P parameters.

Gradients are clamped to +-8 and rounded to multiples of 2^-12. Fewer than 512 of them add up in
fp32 without any rounding, so a sum does not depend on its order and equality is exact: bit for
bit, where real gradients would need a tolerance.
"""

from __future__ import annotations

from random import Random

import torch

from protocol.manifest import Manifest
from protocol.ports import Tensor

_GRID = 4096.0
_LIMIT = 8.0


def initial_weights(manifest: Manifest, stage: int) -> Tensor:
    """Return the weights [P = 2C] of a stage at step 0, a function of (seed, stage)."""
    num_weights = 2 * (manifest.model.width - 1)
    rng = Random(f"toy weights {manifest.training.seed} {stage}")  # noqa: S311
    centre = 1.0 if stage == 0 else 0.0
    values = [centre + rng.uniform(-0.5, 0.5) for _ in range(num_weights)]
    return torch.tensor(values, dtype=torch.float64)


def draw(manifest: Manifest, step: int, slot: int) -> tuple[Tensor, Tensor]:
    """Return input and target [B, T, C] of a microbatch; ``step`` -1 is the held-out data."""
    shape = (manifest.training.microbatch, manifest.model.context, manifest.model.width - 1)
    rng = Random(f"toy data {manifest.data.seed} {step} {slot}")  # noqa: S311
    values = [rng.uniform(-1, 1) for _ in range(shape[0] * shape[1] * shape[2])]
    x_BTC = torch.tensor(values, dtype=torch.float64).reshape(shape)
    return x_BTC, torch.sin(3 * x_BTC)


def block_forward(weights_P: Tensor, x_BTC: Tensor) -> Tensor:
    """Return y = x + tanh(w x + b)."""
    w_C, b_C = weights_P.chunk(2)
    return x_BTC + torch.tanh(w_C * x_BTC + b_C)


def block_backward(weights_P: Tensor, x_BTC: Tensor, g_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by x and by the weights."""
    w_C, b_C = weights_P.chunk(2)
    inner_BTC = g_BTC * (1 - torch.tanh(w_C * x_BTC + b_C) ** 2)
    by_w_C, by_b_C = (inner_BTC * x_BTC).sum((0, 1)), inner_BTC.sum((0, 1))
    return g_BTC + inner_BTC * w_C, torch.cat((by_w_C, by_b_C))


def embed(weights_P: Tensor, x_BTC: Tensor) -> Tensor:
    """Return h = e x."""
    return weights_P.chunk(2)[0] * x_BTC


def head(weights_P: Tensor, h_BTC: Tensor, target_BTC: Tensor) -> tuple[float, Tensor, Tensor]:
    """Return the mean squared error and its gradients by h [B, T, C] and by u [C]."""
    u_C = weights_P.chunk(2)[1]
    error_BTC = u_C * h_BTC - target_BTC
    scaled_BTC = 2 * error_BTC / error_BTC.numel()
    return float((error_BTC**2).mean()), scaled_BTC * u_C, (scaled_BTC * h_BTC).sum((0, 1))


def embed_backward(x_BTC: Tensor, g_BTC: Tensor) -> Tensor:
    """Return the gradient by e [C]."""
    return (g_BTC * x_BTC).sum((0, 1))


def on_grid(gradient_P: Tensor) -> Tensor:
    """Return the gradient as multiples of 2^-12 within +-8, which sum exactly in fp32."""
    return torch.round(gradient_P.clamp(-_LIMIT, _LIMIT) * _GRID) / _GRID
