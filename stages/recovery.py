"""A lost stage's weights from its neighbours' (CheckFree, arXiv 2506.15461, section 4.2).

    W = A + t (B - A),    t = w_above / (w_below + w_above)

Layer k of the stage comes from layer k of the stage below (A) and of the one above (B). This form
gives exactly A where A and B are equal, and, after rounding has been cut off, lies between them.
Only weights are mixed: they are all there is in fp32 besides moments, which begin anew; rotary
tables and masks are no part of a state. Each operation is one that IEEE 754 fixes, so all who mix
the same states come to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from protocol.errors import NonFinite, StateMismatch
from protocol.manifest import Manifest
from stages.snapshot import SnapshotFormat, snapshot_format

Tensor = torch.Tensor
_MOST_HEAD_BYTES = 2**26  # more than the names of any stage take


def check_alike(manifest: Manifest, stage: int, source: int) -> None:
    """Raise StateMismatch unless ``stage`` can take its layers from those of ``source``."""
    model, pipeline = manifest.model, manifest.pipeline
    mine, theirs = (len(pipeline.layers_of(k, model.layers)) for k in (stage, source))
    if mine != theirs:
        raise StateMismatch(
            f"stage {stage} has {mine} layers and cannot be rebuilt from stage {source}, "
            f"which has {theirs}"
        )


@torch.no_grad()
def merge(below_N: Tensor, above_N: Tensor, weight_above: float) -> Tensor:
    """Return the flat weights between two stages' flat weights; the inputs stay as they are.

    Raises NonFinite if they are not finite, ValueError if they are not two rows of one length.
    """
    if below_N.shape != above_N.shape or below_N.dim() != 1 or not 0 <= weight_above <= 1:
        raise ValueError(f"{tuple(below_N.shape)} and {tuple(above_N.shape)} at {weight_above}")
    for flat in (below_N, above_N):
        if not bool(torch.isfinite(flat).all()):
            raise NonFinite(0, "weights", "a neighbour's state")
    if weight_above in (0.0, 1.0):
        return (above_N if weight_above else below_N).clone()
    mixed_N = torch.sub(above_N, below_N).mul_(weight_above).add_(below_N)
    torch.maximum(mixed_N, torch.minimum(below_N, above_N), out=mixed_N)
    torch.minimum(mixed_N, torch.maximum(below_N, above_N), out=mixed_N)
    # Two zeros of different sign are equal; so are all numbers that need no mixing.
    return torch.where(below_N == above_N, below_N, mixed_N)


@dataclass(frozen=True)
class Fetched:
    """What is needed of another stage's state: flat weights [n], and what tells their weight."""

    stage: int
    step: int
    gradient_norm: float | None
    weights: Tensor


class WeightReader:
    """Takes a state's canonical bytes piece by piece and keeps the weights alone.

    All bytes are hashed, so that the weights are known to be those of the digest; moments are not
    kept. Two of these hold all that rebuilding a stage needs.
    """

    def __init__(self, manifest: Manifest, stage: int, digest: str) -> None:
        self._form = snapshot_format(manifest, stage)
        self._digest = digest
        self._hash = sha256()
        self._head: bytearray | None = bytearray()
        self._num_bytes = 0
        self._num_weight_bytes = 4 * self._form.layout.num_elements
        self._weights = torch.empty(self._form.layout.num_elements)
        self._decoded: tuple[int, SnapshotFormat] | None = None  # step, and the course

    def feed(self, piece: Tensor) -> None:
        """Take the next bytes (uint8); raise StateMismatch if they begin no state of the stage."""
        self._hash.update(piece.numpy().data)
        if self._head is None:
            self._keep(piece)
            return
        self._head += piece.numpy().data
        length = 8 + int.from_bytes(self._head[:8], "little")
        if length > _MOST_HEAD_BYTES:
            raise StateMismatch(f"the state's header claims {length} bytes")
        if len(self._head) >= max(8, length):
            step, form, start = self._form.read_head(memoryview(bytes(self._head)))
            self._decoded = step, form
            rest, self._head = self._head[start:], None
            if rest:
                self._keep(torch.frombuffer(rest, dtype=torch.uint8))

    def finish(self) -> Fetched:
        """Return what was read; raise StateMismatch unless all has come and has the digest."""
        if self._decoded is None or self._hash.hexdigest() != self._digest:
            raise StateMismatch(f"the state of stage {self._form.stage} is not {self._digest}")
        if self._num_bytes != self._form.num_data_bytes:
            raise StateMismatch(f"the state holds {self._num_bytes} bytes of numbers")
        step, form = self._decoded
        norm = form.course.gradient_norm if form.course else None
        return Fetched(form.stage, step, norm, self._weights)

    def _keep(self, piece: Tensor) -> None:
        room = self._weights.view(torch.uint8)[self._num_bytes : self._num_weight_bytes]
        part = piece[: len(room)]
        room[: len(part)].copy_(part)
        self._num_bytes += len(piece)


def read_weights(manifest: Manifest, stage: int, digest: str, pieces: Iterable[Tensor]) -> Fetched:
    """Return what is needed of a state whose bytes come in pieces."""
    reader = WeightReader(manifest, stage, digest)
    for piece in pieces:
        reader.feed(piece)
    return reader.finish()


def rebuilt_weights(
    manifest: Manifest, stage: int, sources: Sequence[Fetched], weight_above: float = 0.5
) -> Tensor:
    """Return the flat weights of a stage from its twin's, or from both neighbours', lower first.

    Raises StateMismatch if the sources have other layers or are not of one step, NonFinite if
    they are not finite.
    """
    for source in sources:
        check_alike(manifest, stage, source.stage)
    if len({source.step for source in sources}) != 1:
        raise StateMismatch(f"stage {stage} cannot be rebuilt from states of different steps")
    return merge(sources[0].weights, sources[-1].weights, weight_above)
