"""The weights at step 0: a function of the seed and the parameter's name alone.

A holder that starts one stage, and a loop that makes the whole model, get the same bits. The
recipe, in full, for the parameter NAME (Hugging Face's Llama name, for example
``model.layers.3.self_attn.q_proj.weight``; layers count from 0 through the whole model) under
``training.seed`` SEED of a model of L layers:

1. key = the first 16 bytes of SHA-256("shoal/init/{SEED}/{NAME}" in UTF-8), little-endian
2. x = numpy.random.Generator(numpy.random.Philox(key=key)).standard_normal([rows, columns])
   in float64, rows of the matrix first
3. weight = float32(x * std); std is 0.02, and 0.02 / sqrt(2 L) for ``o_proj`` and ``down_proj``,
   whose products are added to the residual stream

Philox is counter-based integer arithmetic and the normals are float64 rounded to float32: unlike
torch's vectorised generators, they do not depend on the processor's vector width.
"""

from __future__ import annotations

import math
from hashlib import sha256

import numpy as np
import torch

from stages.layout import Layout, Parameter

STD = 0.02


def initial_parameter(parameter: Parameter, seed: int, num_layers: int) -> torch.Tensor:
    """Return the fp32 matrix [rows, columns] of one parameter at step 0."""
    digest = sha256(f"shoal/init/{seed}/{parameter.name}".encode()).digest()
    philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    std = STD / math.sqrt(2 * num_layers) if parameter.is_residual else STD
    normal = np.random.Generator(philox).standard_normal((parameter.rows, parameter.columns))
    return torch.from_numpy((normal * std).astype(np.float32))


def fill_initial(flat: torch.Tensor, layout: Layout, seed: int, num_layers: int) -> None:
    """Write the weights of step 0 into the flat fp32 buffer of a stage."""
    views = layout.named_views(flat)
    for parameter in layout.parameters:
        views[parameter.name].copy_(initial_parameter(parameter, seed, num_layers))
