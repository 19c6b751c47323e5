"""Frames: how a message and its tensors become bytes, and how bytes are refused.

A frame is a fixed prefix, a msgpack header and raw tensor bytes:

    magic 4 | version u8 | type u8 | header u32 | payload u64 | crc32 u32 | sequence u64 | ack u64

The prefix names the type, so that every claimed length is checked against that type's limit
before anything is allocated. The checksum covers header and payload. ``sequence`` counts the
frames of a lane (0: not counted); ``ack`` is the last frame that the sender has taken over.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgpack
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ProtocolViolation
from protocol.messages import MESSAGE_TYPES

Buffer = bytes | bytearray | memoryview

MAGIC = b"SHOL"
VERSION = 1
_PREFIX = struct.Struct("!4sBBIQIQQ")
PREFIX_BYTES = _PREFIX.size

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE

# Positions are the type codes on the wire, from 1: append only, never reorder.
_KINDS: tuple[str, ...] = (
    "presence", "assign", "step_open", "prepare", "promise", "accept", "accepted", "prepared",
    "applied", "suspect", "forward", "backward", "commit", "release", "failed", "busy",
    "step_close", "ledger", "fetch_boundary", "boundary", "redrive", "reduce_part",
    "reduce_result", "fetch_state", "state_chunk", "paused", "average_report",
    "computed", "hop_lost", "resume", "flow_introduce", "flow_offers", "flow_request",
    "flow_answer", "flow_costs", "flow_check", "flow_release", "flow_labels", "token_prepare",
    "token_vote", "token_end", "token_ask", "flow_state", "pin", "pinned", "unpin", "extend",
    "stuck", "fetch_pinned", "fetch_initial", "flow_walk", "flow_meet",
)  # fmt: skip
MESSAGE_CODES: dict[int, type[BaseModel]] = {
    code: MESSAGE_TYPES[kind] for code, kind in enumerate(_KINDS, start=1)
}
# These carry a roster, the slots or the ids of a whole step.
_LARGE_KINDS = frozenset({"step_open", "promise", "accept", "step_close", "ledger"})

_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "uint8": torch.uint8,
    "int64": torch.int64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest claims that are believed, in bytes; the tensor limit comes from the manifest."""

    max_tensor_bytes: int
    max_header_bytes: int = 64 * KIBIBYTE
    max_large_header_bytes: int = 4 * MEBIBYTE


class TensorSpec(BaseModel):
    """Shape and element type of one tensor in the payload."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    dtype: Literal["float32", "bfloat16", "float16", "uint8", "int64"]
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=2**48, strict=True)], ...], Field(max_length=8)
    ]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's contiguous bytes."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize

    @property
    def is_representable(self) -> bool:
        """Whether torch can count the strides; an empty tensor may still claim huge dimensions."""
        return math.prod(max(1, size) for size in self.shape) < 2**48


class _Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    fields: dict[str, object]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The fixed part of a frame, after its claims were checked."""

    code: int
    header_bytes: int
    payload_bytes: int
    checksum: int
    sequence: int
    acknowledged: int

    @property
    def num_bytes(self) -> int:
        """Size of the whole frame."""
        return PREFIX_BYTES + self.header_bytes + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """An encoded message; the payload still is the memory of the tensors."""

    code: int
    kind: str
    header: bytes
    payload: tuple[memoryview, ...]
    checksum: int

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors."""
        return sum(view.nbytes for view in self.payload)

    @property
    def num_bytes(self) -> int:
        """Size of the whole frame."""
        return PREFIX_BYTES + len(self.header) + self.payload_bytes

    def buffers(self, sequence: int = 0, acknowledged: int = 0) -> list[Buffer]:
        """Return the pieces to write, in order; tensors are not copied."""
        lengths = len(self.header), self.payload_bytes
        prefix = _PREFIX.pack(
            MAGIC, VERSION, self.code, *lengths, self.checksum, sequence, acknowledged
        )
        return [prefix + self.header, *self.payload]


@dataclass(frozen=True, slots=True)
class Opened:
    """A validated header: the message, and what its payload must look like."""

    message: BaseModel
    specs: tuple[TensorSpec, ...]


class Codec:
    """Encodes and decodes frames of the message types it knows, within limits."""

    def __init__(self, limits: Limits, extra: Mapping[int, type[BaseModel]] | None = None) -> None:
        self.limits = limits
        self._types = {**MESSAGE_CODES, **(extra or {})}
        self._codes = {kind_of(model): code for code, model in self._types.items()}

    def encode(self, message: BaseModel, tensors: Sequence[torch.Tensor] = ()) -> Frame:
        """Turn a message into a frame; ValueError if we would break our own limits."""
        kind = kind_of(type(message))
        code = self._codes[kind]
        specs = [{"dtype": _dtype_name(t), "shape": tuple(t.shape)} for t in tensors]
        fields = message.model_dump(exclude={"kind"})
        header = msgpack.packb({"kind": kind, "fields": fields, "tensors": specs})
        payload = tuple(_view(tensor) for tensor in tensors)
        frame = Frame(code, kind, header, payload, _checksum(header, payload))
        self._refuse_own_excess(frame)
        return frame

    def open_prefix(self, data: Buffer) -> Prefix:
        """Read and check the fixed part; nothing that it claims has been allocated yet."""
        if len(data) != PREFIX_BYTES:
            raise ProtocolViolation(f"a frame prefix has {PREFIX_BYTES} bytes, not {len(data)}")
        magic, version, code, header, payload, checksum, sequence, ack = _PREFIX.unpack(data)
        if magic != MAGIC or version != VERSION:
            raise ProtocolViolation("not a frame of this protocol version")
        if code not in self._types:
            raise ProtocolViolation(f"unknown frame type {code}")
        if header > self._header_limit(code):
            raise ProtocolViolation(f"claims a header of {header} bytes for type {code}")
        if payload > self._payload_limit(code):
            raise ProtocolViolation(f"claims a payload of {payload} bytes for type {code}")
        return Prefix(code, header, payload, checksum, sequence, ack)

    def open_header(self, prefix: Prefix, data: Buffer) -> Opened:
        """Validate the msgpack header against its model and the payload length of the prefix."""
        model = self._types[prefix.code]
        try:
            header = _Header.model_validate(msgpack.unpackb(data))
            message = model.model_validate(header.fields)
        except (ValidationError, ValueError, TypeError, msgpack.exceptions.UnpackException) as err:
            raise ProtocolViolation(f"malformed {kind_of(model)} header") from err
        if header.kind != kind_of(model) or len(data) != prefix.header_bytes:
            raise ProtocolViolation(f"the header does not fit its prefix ({kind_of(model)})")
        self._check_specs(header.tensors, prefix, model)
        return Opened(message, header.tensors)

    def open_payload(
        self, prefix: Prefix, header: Buffer, opened: Opened, payload: bytearray | memoryview
    ) -> tuple[torch.Tensor, ...]:
        """Check the checksum; return tensors that share memory with ``payload``."""
        if len(payload) != prefix.payload_bytes:
            raise ProtocolViolation("the payload is not as long as its prefix claims")
        if zlib.crc32(payload, zlib.crc32(header)) != prefix.checksum:
            raise ProtocolViolation("a frame does not match its checksum")
        tensors, at = [], 0
        for spec in opened.specs:
            tensors.append(_tensor(spec, memoryview(payload)[at : at + spec.num_bytes]))
            at += spec.num_bytes
        return tuple(tensors)

    def kind(self, code: int) -> str:
        """The message kind of a type code that ``open_prefix`` accepted."""
        return kind_of(self._types[code])

    def _header_limit(self, code: int) -> int:
        if self.kind(code) in _LARGE_KINDS:
            return self.limits.max_large_header_bytes
        return self.limits.max_header_bytes

    def _payload_limit(self, code: int) -> int:
        return _max_tensors(self._types[code]) * self.limits.max_tensor_bytes

    def _check_specs(
        self, specs: tuple[TensorSpec, ...], prefix: Prefix, model: type[BaseModel]
    ) -> None:
        if len(specs) > _max_tensors(model):
            raise ProtocolViolation(f"{kind_of(model)} carries {len(specs)} tensors")
        if any(
            spec.num_bytes > self.limits.max_tensor_bytes or not spec.is_representable
            for spec in specs
        ):
            raise ProtocolViolation(f"{kind_of(model)} carries a tensor beyond the limit")
        if sum(spec.num_bytes for spec in specs) != prefix.payload_bytes:
            raise ProtocolViolation(f"the tensors of {kind_of(model)} do not fill its payload")

    def _refuse_own_excess(self, frame: Frame) -> None:
        if len(frame.header) > self._header_limit(frame.code):
            raise ValueError(f"the header of {frame.kind} has {len(frame.header)} bytes")
        if len(frame.payload) > _max_tensors(self._types[frame.code]) or any(
            view.nbytes > self.limits.max_tensor_bytes for view in frame.payload
        ):
            raise ValueError(f"{frame.kind} cannot carry these tensors")


def kind_of(model: type[BaseModel]) -> str:
    """The name of a message type on the wire."""
    return str(model.model_fields["kind"].default)


def _max_tensors(model: type[BaseModel]) -> int:
    return int(getattr(model, "max_tensors", 0))


def _dtype_name(tensor: torch.Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"tensors of {tensor.dtype} do not travel")
    return _DTYPE_NAMES[tensor.dtype]


def _view(tensor: torch.Tensor) -> memoryview:
    # numpy has no bfloat16, so every type goes out as its bytes
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(cast(Buffer, flat.view(torch.uint8).numpy()))


def _checksum(header: bytes, payload: tuple[memoryview, ...]) -> int:
    checksum = zlib.crc32(header)
    for view in payload:
        checksum = zlib.crc32(view, checksum)
    return checksum


def _tensor(spec: TensorSpec, data: memoryview) -> torch.Tensor:
    dtype = _DTYPES[spec.dtype]
    if not data.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(spec.shape)
