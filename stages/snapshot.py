"""The canonical bytes of a stage's state: what is hashed, sent to joiners and compared.

    4 bytes   length of the header, little-endian
    header    compact JSON with sorted keys: epoch, format, optimizer, parameters, stage, step
    data      fp32 little-endian: weights, then each moment, in the order of the parameters

Equal states have equal bytes, so the SHA-256 of the bytes names the state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256

import torch

from protocol.errors import StateMismatch
from stages.layout import Layout

_FORMAT = 1
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class SnapshotFormat:
    """What fixes the bytes of a stage's state, besides the step and the numbers."""

    stage: int
    optimizer: str
    layout: Layout
    num_moments: int
    epoch: int = 0

    @property
    def num_data_bytes(self) -> int:
        """Size of weights and moments."""
        return 4 * (1 + self.num_moments) * self.layout.num_elements

    def head(self, step: int) -> bytes:
        """Return the length and the header of the state at ``step``."""
        fields = {
            "epoch": self.epoch,
            "format": _FORMAT,
            "optimizer": self.optimizer,
            "parameters": [[p.name, p.rows, p.columns] for p in self.layout.parameters],
            "stage": self.stage,
            "step": step,
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        return len(text).to_bytes(_LENGTH_BYTES, "little") + text

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

    def decode(self, encoded: torch.Tensor, digest: str, data: torch.Tensor) -> int:
        """Write the numbers into ``data`` and return the step.

        Raises StateMismatch, with ``data`` untouched, unless the bytes have this digest and are
        a state of this stage.
        """
        raw = _raw_bytes(encoded)
        if sha256(raw).hexdigest() != digest:
            raise StateMismatch(f"the state of stage {self.stage} does not have digest {digest}")
        step = self._step_of(raw)
        body = encoded.flatten()[len(self.head(step)) :]
        data.view(torch.uint8).flatten().copy_(body)
        return step

    def _step_of(self, raw: memoryview) -> int:
        end = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "little")
        try:
            step = int(json.loads(bytes(raw[_LENGTH_BYTES:end]))["step"])
        except (ValueError, KeyError, TypeError):
            raise StateMismatch("the state's header cannot be read") from None
        # Writing the header anew compares every field at once, and its spelling.
        if step < 0 or bytes(raw[:end]) != self.head(step):
            raise StateMismatch(f"the state is not one of stage {self.stage} of this swarm")
        if len(raw) - end != self.num_data_bytes:
            raise StateMismatch(
                f"the state holds {len(raw) - end} bytes of numbers, not {self.num_data_bytes}"
            )
        return step


def _raw_bytes(encoded: torch.Tensor) -> memoryview:
    if encoded.dtype != torch.uint8 or encoded.dim() != 1 or not encoded.is_contiguous():
        raise StateMismatch("a state is one contiguous row of bytes")
    return encoded.numpy().data
