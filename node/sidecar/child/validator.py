"""What this DHT node stores for others and believes from them: valid records, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgpack

from protocol.errors import ConfigError, ProtocolViolation
from protocol.keys import PeerId
from protocol.manifest import SignedManifest
from protocol.records import (
    MAX_LIFETIME_S,
    MAX_MANIFEST_BYTES,
    NodeRecord,
    SeenSequences,
    open_record,
)

MAX_NODES = 10_000
# All records lie under one key and travel in one message, which breaks beyond 3 MB.
MAX_BYTES = 5 * 2**19


class StoredRecord(Protocol):
    """hivemind's DHTRecord: ``key`` is a digest, ``subkey`` and ``value`` are msgpack."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


class RecordValidator:
    """hivemind's RecordValidatorBase by shape, so that it can be tested without hivemind.

    A node record must stand under its own node's subkey and expire when it says so: then nobody
    else can prolong it, and a replayed older one never outlives a newer one.
    """

    priority = 0

    def __init__(
        self, swarm: str, nodes_key: bytes, manifest_key: bytes, now: Callable[[], float]
    ) -> None:
        self._swarm, self._now = swarm, now
        self._nodes_key, self._manifest_key = nodes_key, manifest_key
        self._seen = SeenSequences(MAX_NODES)
        # A thousand records come back from twenty nodes at each lookup: verify each once.
        self._opened: dict[PeerId, tuple[bytes, NodeRecord]] = {}
        self._num_bytes = 0

    def validate(self, record: StoredRecord) -> bool:
        """Tell whether to store or believe a record."""
        try:
            subkey, value = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
            if record.key == self._nodes_key:
                return self._is_node_record(subkey, value, record.expiration_time)
            if record.key == self._manifest_key and subkey is None:
                return self._is_manifest(value, record.expiration_time)
        except (ValueError, TypeError, msgpack.UnpackException):
            return False
        return False

    def sign_value(self, record: StoredRecord) -> bytes:
        """Values come signed from the daemon: the side-car does not have the node's key."""
        return record.value

    def strip_value(self, record: StoredRecord) -> bytes:
        """The signature stays, for the daemon to see."""
        return record.value

    def merge_with(self, other: object) -> bool:
        """There is one validator."""
        return False

    def _is_node_record(self, subkey: object, value: object, expires_at: object) -> bool:
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            return False
        try:
            record = self._open(PeerId(subkey), value)
        except ProtocolViolation:
            return False
        return (
            record.peer_id == subkey
            and record.expires_at == expires_at
            and self._has_room_for(record.peer_id, value)
            and self._seen.admit(record, self._now())
            and self._keep(record, value)
        )

    def _open(self, peer: PeerId, value: bytes) -> NodeRecord:
        data, known = self._opened.get(peer, (b"", None))
        if known is not None and data == value and known.expires_at > self._now():
            return known
        return open_record(value, swarm=self._swarm, now=self._now())

    def _has_room_for(self, peer: PeerId, value: bytes) -> bool:
        """Invented nodes must not crowd out the real ones: those renew what they have."""
        known, _ = self._opened.get(peer, (b"", None))
        if self._num_bytes + len(value) - len(known) <= MAX_BYTES:
            return True
        now = self._now()
        self._opened = {p: (v, r) for p, (v, r) in self._opened.items() if r.expires_at > now}
        self._num_bytes = sum(len(v) for v, _ in self._opened.values())
        known, _ = self._opened.get(peer, (b"", None))
        return self._num_bytes + len(value) - len(known) <= MAX_BYTES

    def _keep(self, record: NodeRecord, value: bytes) -> bool:
        known, _ = self._opened.get(record.peer_id, (b"", None))
        self._num_bytes += len(value) - len(known)
        self._opened[record.peer_id] = (value, record)
        return True

    def _is_manifest(self, value: object, expires_at: float) -> bool:
        if not isinstance(value, str) or len(value) > MAX_MANIFEST_BYTES:
            return False
        if not 0 < expires_at - self._now() <= MAX_LIFETIME_S:
            return False
        try:
            SignedManifest.from_toml(value).verify(self._swarm)
        except ConfigError:
            return False
        return True
