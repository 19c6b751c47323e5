"""What nodes say about themselves in the DHT: signed, sequenced, expiring records.

A record travels as msgpack ``[body, signature]``; the body is canonical JSON and the signature is
the node's over a tag and the body, so that it means nothing elsewhere. The signed manifest lies
beside them and needs no record of its own, because its hash is the swarm id.
"""

from __future__ import annotations

import json
from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ProtocolViolation
from protocol.keys import NodeKey, PeerId, is_signed_by

MAX_RECORD_BYTES = 4096
MAX_MANIFEST_BYTES = 64 * 1024
MAX_LIFETIME_S = 600.0
MAX_ADDRESSES = 16
MAX_FLOWS = 2**16
MAX_COST_MS = 10_000_000
_TAG = b"shoal/node-record/1\n"

SwarmId = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Peer = Annotated[PeerId, Field(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
Address = Annotated[str, Field(min_length=2, max_length=200, pattern=r"^/[\x21-\x7e]+$")]


class Claim(BaseModel):
    """A node's word that it is about to serve a stage (GWTF spec 1.5). It expires by itself.

    ``epoch`` makes another draw of who gives way each time. A firm claim has been looked at twice:
    its node goes there as soon as the step in flight ends.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: Annotated[int, Field(ge=1, lt=4096)]
    epoch: Annotated[int, Field(ge=0, lt=2**53)]
    expires_at: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    is_firm: bool = False


class NodeRecord(BaseModel):
    """A node's word about itself. ``stage`` is -1 for none, 0 for a data node, else 1..S.

    ``sidecar_id`` is the PeerID of the node's side-car: this record is what binds the two keys.
    ``expires_at`` is wall time in seconds, because nodes compare it with their own clocks.
    ``capacity`` is how many flows it can carry at once (a data node: how many it wants), ``used``
    how many it carries, ``cost_ms`` the mean cost from here to the data node, if that is known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    swarm: SwarmId
    peer_id: Peer
    sidecar_id: Peer
    stage: Annotated[int, Field(ge=-1, lt=4096)]
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]
    sequence: Annotated[int, Field(ge=0, lt=2**53)]
    expires_at: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    protocol_version: Annotated[int, Field(ge=0, lt=2**31)]
    is_draining: bool = False
    capacity: Annotated[int, Field(ge=0, le=MAX_FLOWS)] = 0
    used: Annotated[int, Field(ge=0, le=MAX_FLOWS)] = 0
    cost_ms: Annotated[int, Field(ge=0, le=MAX_COST_MS)] | None = None
    claim: Claim | None = None

    def body(self) -> bytes:
        """Return the canonical bytes that the node signs."""
        return json.dumps(
            self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")
        ).encode()


class SignedRecord(BaseModel):
    """The bytes of a record and the signature over them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    body: Annotated[bytes, Field(max_length=MAX_RECORD_BYTES)]
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]

    def to_bytes(self) -> bytes:
        """Return the form in which the record travels."""
        packed: bytes = msgpack.packb([self.body, self.signature])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedRecord:
        """Read what ``to_bytes`` wrote; raise ProtocolViolation for anything else."""
        if len(data) > MAX_RECORD_BYTES:
            raise ProtocolViolation(f"record of {len(data)} bytes; the limit is {MAX_RECORD_BYTES}")
        try:
            body, signature = msgpack.unpackb(data, raw=False)
            return cls(body=body, signature=signature)
        except (ValueError, TypeError, ValidationError, msgpack.UnpackException) as error:
            raise ProtocolViolation("record is not [body, signature]") from error


def sign(record: NodeRecord, key: NodeKey) -> bytes:
    """Return the signed bytes of ``record``; ValueError if it names another node or is too big."""
    if record.peer_id != key.peer_id:
        raise ValueError(f"the record names {record.peer_id}, the key is {key.peer_id}'s")
    body = record.body()
    data = SignedRecord(body=body, signature=key.sign(_TAG + body)).to_bytes()
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"the record has {len(data)} bytes; the limit is {MAX_RECORD_BYTES}")
    return data


def open_record(data: bytes, *, swarm: str, now: float) -> NodeRecord:
    """Return the valid record in ``data`` or raise ProtocolViolation. ``now`` is wall time."""
    signed = SignedRecord.from_bytes(data)
    try:
        record = NodeRecord.model_validate_json(signed.body)
    except ValidationError as error:
        raise ProtocolViolation("record body is malformed") from error
    # One record has one form: otherwise a relay could make two that differ only in spaces.
    if record.body() != signed.body:
        raise ProtocolViolation("record body is not canonical")
    if record.swarm != swarm:
        raise ProtocolViolation(f"record of another swarm, {record.swarm[:12]}")
    if record.expires_at <= now:
        raise ProtocolViolation(f"record expired {now - record.expires_at:.1f} s ago")
    if record.expires_at > now + MAX_LIFETIME_S:
        raise ProtocolViolation(f"record expires more than {MAX_LIFETIME_S:.0f} s ahead")
    if not is_signed_by(record.peer_id, _TAG + signed.body, signed.signature):
        raise ProtocolViolation(f"record of {record.peer_id} has a bad signature")
    return record


class SeenSequences:
    """The newest record of each node: an older one never replaces it, nor a different twin.

    Bounded: nodes are forgotten when all that was seen of them expired, and beyond ``max_nodes``
    unknown ones are refused, so that invented identities cannot fill the memory.
    """

    def __init__(self, max_nodes: int = 10_000) -> None:
        self._max_nodes = max_nodes
        self._newest: dict[PeerId, NodeRecord] = {}
        self._forget_at: dict[PeerId, float] = {}

    def admit(self, record: NodeRecord, now: float) -> bool:
        """Remember ``record`` and return True, or False if a newer one is known."""
        newest = self._newest.get(record.peer_id)
        if newest is None:
            if len(self._newest) >= self._max_nodes and not self._forget_expired(now):
                return False
        elif record.sequence < newest.sequence:
            return False
        elif record.sequence == newest.sequence:
            return record == newest
        self._newest[record.peer_id] = record
        self._forget_at[record.peer_id] = max(
            record.expires_at, self._forget_at.get(record.peer_id, 0.0)
        )
        return True

    def _forget_expired(self, now: float) -> bool:
        """Drop what expired; tell whether there is room again."""
        for peer in [peer for peer, at in self._forget_at.items() if at <= now]:
            del self._newest[peer], self._forget_at[peer]
        return len(self._newest) < self._max_nodes
