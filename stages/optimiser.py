"""Optimisers over flat fp32 buffers: read old weights and moments, write new ones elsewhere.

AdamW (Loshchilov & Hutter 2019, decoupled decay, bias correction), at step t = 1, 2, ...:

    m' = b1 m + (1 - b1) g,    v' = b2 v + (1 - b2) g^2
    w' = (1 - lr decay) w - lr / (1 - b1^t) * m' / (sqrt(v') / sqrt(1 - b2^t) + epsilon)

SGD with momentum, in which the decay joins the gradient, as in ``torch.optim.SGD``:

    m' = momentum m + (g + decay w),    w' = w - lr m'

Every holder of a stage must come to the same bits, whatever its processor. So the arithmetic is
a sequence of single multiplications, additions, divisions and square roots, which IEEE 754 fixes
exactly; fused or vectorised variants (``lerp``, ``addcmul``, fused Adam) may or may not contract
a product and a sum. A chunk of the buffers at a time stays in cache, so many passes cost little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from protocol.errors import ConfigError
from protocol.manifest import OptimizerSpec

Tensor = torch.Tensor
_CHUNK_ELEMENTS = 32 * 1024


class Optimiser(Protocol):
    """An update rule; ``num_moments`` flat buffers of state belong to it."""

    num_moments: int

    def update(
        self, old: Sequence[Tensor], new: Sequence[Tensor], grad: Tensor, lr: float, t: int
    ) -> None:
        """Write weights and moments after update ``t`` (from 1); ``grad`` serves as scratch."""
        ...


class AdamW:
    """AdamW with decoupled weight decay and bias correction."""

    num_moments = 2

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec

    def update(
        self, old: Sequence[Tensor], new: Sequence[Tensor], grad: Tensor, lr: float, t: int
    ) -> None:
        """Write weights and moments after update ``t`` (from 1); ``grad`` serves as scratch."""
        spec, (w, m, v), (new_w, new_m, new_v) = self._spec, old, new
        torch.mul(v, spec.beta2, out=new_v)
        square = torch.mul(grad, grad, out=new_w)
        new_v.add_(square.mul_(1 - spec.beta2))
        torch.mul(m, spec.beta1, out=new_m)
        new_m.add_(grad.mul_(1 - spec.beta1))
        spread = torch.sqrt(new_v, out=grad)
        spread.mul_(1 / math.sqrt(1 - spec.beta2**t)).add_(spec.epsilon)
        change = torch.div(new_m, spread, out=grad).mul_(lr / (1 - spec.beta1**t))
        torch.mul(w, 1 - lr * spec.weight_decay, out=new_w).sub_(change)


class Sgd:
    """SGD with momentum."""

    num_moments = 1

    def __init__(self, spec: OptimizerSpec) -> None:
        self._spec = spec

    def update(
        self, old: Sequence[Tensor], new: Sequence[Tensor], grad: Tensor, lr: float, t: int
    ) -> None:
        """Write weights and momentum after the update; ``grad`` serves as scratch."""
        spec, (w, m), (new_w, new_m) = self._spec, old, new
        if spec.weight_decay:
            grad.add_(torch.mul(w, spec.weight_decay, out=new_w))
        torch.mul(m, spec.momentum, out=new_m).add_(grad)
        torch.sub(w, torch.mul(new_m, lr, out=grad), out=new_w)


def make_optimiser(spec: OptimizerSpec) -> Optimiser:
    """Return the update rule that the manifest names; raise ConfigError if there is none."""
    rules: dict[str, type[AdamW] | type[Sgd]] = {"adamw": AdamW, "sgd": Sgd}
    if spec.name not in rules:
        raise ConfigError(
            f"optimizer {spec.name!r} is not available in this version",
            f"Set training.optimizer.name to one of: {', '.join(rules)}.",
        )
    return rules[spec.name](spec)


def norm_of(flat: Tensor) -> float:
    """Return the Euclidean norm, summed in fp64 so that the order of the sum does not show."""
    parts = torch.split(flat, _CHUNK_ELEMENTS)
    return math.sqrt(math.fsum(float(part.double().square_().sum()) for part in parts))


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return what scales a gradient of this norm down to ``clip_norm`` (0: never), at most 1."""
    return min(1.0, clip_norm / (norm + 1e-6)) if clip_norm else 1.0


def optimise(
    rule: Optimiser, old: Tensor, new: Tensor, grad: Tensor, *, lr: float, t: int
) -> float:
    """Step from buffers ``old`` to ``new`` ([1 + moments, n]); return the norm of the change.

    ``grad`` is overwritten.
    """
    square_norm = 0.0
    for start in range(0, grad.numel(), _CHUNK_ELEMENTS):
        part = slice(start, start + _CHUNK_ELEMENTS)
        old_rows, new_rows, scratch = old[:, part].unbind(), new[:, part].unbind(), grad[part]
        rule.update(old_rows, new_rows, scratch, lr, t)
        change = torch.sub(new_rows[0], old_rows[0], out=scratch)
        square_norm += float(change.square_().sum())
    return math.sqrt(square_norm)
