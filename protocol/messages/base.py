"""What all messages share: the base class and the types of their fields."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from protocol.keys import PeerId

PROTOCOL_VERSION = 1

Lane = Literal["control", "bulk"]
Peer = Annotated[PeerId, Field(min_length=40, max_length=64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Stage = Annotated[int, Field(ge=0, lt=4096)]
Path = Annotated[tuple[Peer, ...], Field(max_length=4096)]
Signature = Annotated[bytes, Field(min_length=64, max_length=64)]


class WorkId(NamedTuple):
    """Names one try at one microbatch; a re-issued microbatch keeps its slot and content."""

    step: int
    data_node: PeerId
    slot: int
    attempt: int


class Message(BaseModel):
    """What every message carries."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: str
    step: Count
    epoch: Count = 0

    lane: ClassVar[Lane] = "control"
    max_tensors: ClassVar[int] = 0
