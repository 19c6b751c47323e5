"""How much memory a stage needs, so that a node takes one that fits. Bytes, rounded up a little."""

from __future__ import annotations

from protocol.manifest import Manifest, ModelSpec
from stages.layout import stage_layout
from stages.optimiser import make_optimiser

_FLOAT_BYTES = 4


def block_activation_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Return what one block keeps for its backward pass over ``num_tokens`` tokens.

    Per token: both norms' inputs and outputs, attention's output (5 widths with the norm's own
    copy), rotated queries and keys with values, and four hidden widths of SwiGLU.
    """
    qkv_width = model.width + 2 * model.kv_heads * model.head_width
    per_token = 6 * model.width + 2 * qkv_width + 4 * model.feed_forward + model.heads
    return _FLOAT_BYTES * per_token * num_tokens


def boundary_bytes(model: ModelSpec, num_tokens: int) -> int:
    """Return the size of an activation between two stages, or of its gradient."""
    return _FLOAT_BYTES * model.width * num_tokens


def kept_bytes(manifest: Manifest, stage: int, num_tokens: int, *, recompute: bool) -> int:
    """Return what a stage keeps of one microbatch between its forward and backward pass."""
    model = manifest.model
    boundary = boundary_bytes(model, num_tokens)
    if stage == 0:
        return 2 * boundary
    if recompute:
        return boundary
    num_layers = len(manifest.pipeline.layers_of(stage, model.layers))
    return num_layers * block_activation_bytes(model, num_tokens)


def stage_bytes(manifest: Manifest, stage: int, capacity: int, *, recompute: bool = False) -> int:
    """Estimate the memory of a stage that holds ``capacity`` microbatches at once.

    Weights and moments twice (old and new), a sum for each data node, their average and the
    gradient under way for the update, and for each microbatch a weight gradient and kept
    activations. What went on to the neighbours, an activation and a gradient, stays until the step
    is over, and so does a gradient per slot where sums are by slot: in the worst case the last
    holder of the stage has those of the whole quota. hivemind's average goes through a packed copy,
    the shared buffer and the side-car's parts under way.
    """
    model, num_tokens = manifest.model, manifest.training.microbatch * manifest.model.context
    flat = _FLOAT_BYTES * stage_layout(manifest, stage).num_elements
    num_states = 2 * (1 + make_optimiser(manifest.training.optimizer).num_moments)
    per_work = flat + kept_bytes(manifest, stage, num_tokens, recompute=recompute)
    if stage == 0:
        transient = 3 * _FLOAT_BYTES * num_tokens * model.vocabulary  # logits and their gradients
    else:
        num_layers = len(manifest.pipeline.layers_of(stage, model.layers))
        transient = (num_layers if recompute else 1) * block_activation_bytes(model, num_tokens)
    num_sums = _num_sums(manifest, stage)
    num_scratch = 5 if manifest.averaging == "hivemind" else 0
    sent = 2 * manifest.training.quota * boundary_bytes(model, num_tokens)
    num_flat = num_states + num_sums + num_scratch + 2
    return num_flat * flat + capacity * per_work + sent + transient


def _num_sums(manifest: Manifest, stage: int) -> int:
    """Sums of gradients that a member may keep in a step: of each data node the manifest knows."""
    if manifest.training.sums == "slots":
        return manifest.training.quota
    if stage == 0:
        return 1  # of its own microbatches
    return max(len(manifest.authorities), manifest.pipeline.min_data_nodes)
