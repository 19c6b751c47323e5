"""The canonical bytes of a stage's state: what is hashed, sent to joiners, compared and stored.

They are a safetensors file: 8 bytes of length (little-endian), a header of compact JSON with sorted
keys, filled up with blanks, and fp32 numbers in the order of the parameters, first the weights
under Hugging Face's names, then each moment. The header's metadata says whose state it is.

Equal states have equal bytes, so the SHA-256 of the bytes names the state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, pairwise

import torch

from protocol.errors import StateMismatch
from protocol.manifest import Manifest
from stages.layout import Layout, stage_layout
from stages.optimiser import make_optimiser

_LENGTH_BYTES = 8
_ALIGNMENT = 8  # of the numbers in the file
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Course:
    """How a state came about, where stages may be rebuilt: it decides how training goes on.

    ``gradient_norm`` is that of the step which made the state, before clipping and in fp32; None
    if no step did. The optimiser counts its updates from ``fresh_at``; ``lr_scale`` is 1 until the
    stage is rebuilt.
    """

    gradient_norm: float | None = None
    fresh_at: int = 0
    lr_scale: float = 1.0

    def after(self, gradient_norm: float) -> Course:
        """The course of the next state. The norm is rounded, so that its last bits do not show."""
        return replace(self, gradient_norm=float(torch.tensor(gradient_norm, dtype=torch.float32)))

    def fields(self) -> dict[str, str]:
        """What stands in the header."""
        norm = self.gradient_norm
        return {
            "fresh_at": str(self.fresh_at),
            "gradient_norm": "" if norm is None else repr(norm),
            "lr_scale": repr(self.lr_scale),
        }

    @classmethod
    def read(cls, fields: Mapping[str, str]) -> Course:
        """Read ``fields`` back; raise KeyError or ValueError."""
        norm = fields["gradient_norm"]
        return cls(
            float(norm) if norm else None, int(fields["fresh_at"]), float(fields["lr_scale"])
        )


@dataclass(frozen=True)
class SnapshotFormat:
    """What fixes the bytes of a stage's state, besides the step and the numbers.

    ``course`` is None, and left out, in a swarm whose stages are never rebuilt.
    """

    swarm: str
    stage: int
    optimizer: str
    layout: Layout
    num_moments: int
    epoch: int = 0
    course: Course | None = None

    @property
    def num_data_bytes(self) -> int:
        """Size of weights and moments."""
        return 4 * (1 + self.num_moments) * self.layout.num_elements

    def head(self, step: int) -> bytes:
        """Return the length and the header of the state at ``step``."""
        metadata = {
            "epoch": str(self.epoch),
            "format": "pt",  # readers of safetensors files ask for it
            "optimizer": self.optimizer,
            "stage": str(self.stage),
            "step": str(step),
            "swarm": self.swarm,
            **(self.course.fields() if self.course else {}),
        }
        fields = {_METADATA: metadata, **self._tensors}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

    @cached_property
    def _tensors(self) -> dict[str, dict[str, object]]:
        """Where each tensor lies in the data, as safetensors describes it."""
        shapes = dict(self._shapes())
        ends = accumulate((4 * rows * columns for rows, columns in shapes.values()), initial=0)
        return {
            name: {"data_offsets": list(offsets), "dtype": "F32", "shape": list(shapes[name])}
            for name, offsets in zip(shapes, pairwise(ends), strict=True)
        }

    def _shapes(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for prefix in ("", *(f"moment_{number + 1}." for number in range(self.num_moments))):
            for parameter in self.layout.parameters:
                yield prefix + parameter.name, (parameter.rows, parameter.columns)

    def digest(self, step: int, data: torch.Tensor) -> str:
        """Return the SHA-256 (hex) of the canonical bytes."""
        digest = sha256(self.head(step))
        digest.update(data.cpu().numpy().data.cast("B"))
        return digest.hexdigest()

    def pieces(self, step: int, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the canonical bytes as two uint8 tensors; the second one is ``data`` itself."""
        head = torch.frombuffer(bytearray(self.head(step)), dtype=torch.uint8)
        return head, data.cpu().view(torch.uint8).flatten()

    def encode(self, step: int, data: torch.Tensor) -> torch.Tensor:
        """Return the canonical bytes as a new uint8 tensor."""
        return torch.cat(self.pieces(step, data))

    def decode(
        self, encoded: torch.Tensor, digest: str, data: torch.Tensor
    ) -> tuple[int, SnapshotFormat]:
        """Write the numbers into ``data``; return the step, and this format with their course.

        Raises StateMismatch, with ``data`` untouched, unless the bytes have this digest and are
        a state of this stage.
        """
        raw = _raw_bytes(encoded)
        if sha256(raw).hexdigest() != digest:
            raise StateMismatch(f"the state of stage {self.stage} does not have digest {digest}")
        step, form, start = self.read_head(raw)
        if len(raw) - start != self.num_data_bytes:
            raise StateMismatch(
                f"the state holds {len(raw) - start} bytes of numbers, not {self.num_data_bytes}"
            )
        data.view(torch.uint8).flatten().copy_(encoded.flatten()[start:])
        return step, form

    def read_head(self, raw: memoryview) -> tuple[int, SnapshotFormat, int]:
        """Return the step, this format with the course, and where the numbers begin.

        Raises StateMismatch if the header is not one of this stage of this swarm.
        """
        end = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
        try:
            metadata = dict(json.loads(bytes(raw[_LENGTH_BYTES:end]))[_METADATA])
            step, swarm = int(metadata["step"]), metadata["swarm"]
            course = Course.read(metadata) if self.course else None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise StateMismatch("the state's header cannot be read") from None
        if swarm != self.swarm:
            raise StateMismatch(f"the state belongs to another swarm, {str(swarm)[:12]}")
        # Writing the header anew compares every field at once, and its spelling.
        form = replace(self, course=course)
        if step < 0 or bytes(raw[:end]) != form.head(step):
            raise StateMismatch(f"the state is not one of stage {self.stage} of this swarm")
        return step, form, end


def snapshot_format(manifest: Manifest, stage: int) -> SnapshotFormat:
    """Return the format of a stage's states, with the course of one that no step has made."""
    optimizer = manifest.training.optimizer
    return SnapshotFormat(
        manifest.swarm_id,
        stage,
        optimizer.name,
        stage_layout(manifest, stage),
        make_optimiser(optimizer).num_moments,
        course=None if manifest.recovery.method == "none" else Course(),
    )


def _raw_bytes(encoded: torch.Tensor) -> memoryview:
    if encoded.dtype != torch.uint8 or encoded.dim() != 1 or not encoded.is_contiguous():
        raise StateMismatch("a state is one contiguous row of bytes")
    return encoded.numpy().data
