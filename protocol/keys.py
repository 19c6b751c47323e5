"""Ed25519 keys and the PeerIDs that name them, without libp2p, so that the side-car can use them.

A PeerID is the base58 form of the identity multihash of libp2p's protobuf public key. It holds the
whole public key: whoever knows a PeerID can check that node's signatures.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import NewType

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PeerId = NewType("PeerId", str)

# multihash: identity (0x00), 36 bytes; protobuf: Type = Ed25519 (08 01), Data of 32 bytes (12 20)
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
# protobuf private key: Type = Ed25519, Data of 64 bytes: seed then public key
_KEY_FILE_PREFIX = bytes.fromhex("08011240")


class NodeKey:
    """A node's private key: the node itself, as far as others can tell."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != 32:
            raise ValueError(f"an Ed25519 seed has 32 bytes, not {len(seed)}")
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public = self._private.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public)

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature of ``data``."""
        return self._private.sign(data)

    def derive(self, purpose: str) -> NodeKey:
        """Return another key that only the owner of this one can derive (HMAC-SHA256 of the seed).

        One PeerID on two endpoints sends streams to the wrong one, so the side-car gets its own.
        """
        return NodeKey(hmac.digest(self.seed, b"shoal/" + purpose.encode(), sha256))

    def to_bytes(self) -> bytes:
        """Return the canonical 68 bytes of a libp2p Ed25519 private key file."""
        return _KEY_FILE_PREFIX + self.seed + self.public

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeKey:
        """Read the canonical 68 bytes; raise ValueError for anything else."""
        if len(data) != 68 or not data.startswith(_KEY_FILE_PREFIX):
            raise ValueError("not a 68-byte Ed25519 key")
        key = cls(data[4:36])
        if key.public != data[36:]:
            raise ValueError("the public half of the key does not match its private half")
        return key

    def __repr__(self) -> str:
        return f"NodeKey({self.peer_id})"


def peer_id_of(public: bytes) -> PeerId:
    """Return the PeerID of a 32-byte Ed25519 public key."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public).decode())


def public_of(peer_id: str) -> bytes:
    """Return the 32-byte public key inside a PeerID; raise ValueError if it holds none."""
    raw = base58.b58decode(peer_id)
    if len(raw) != 38 or not raw.startswith(_PEER_ID_PREFIX):
        raise ValueError(f"{peer_id!r} is not an Ed25519 PeerID")
    return raw[6:]


def is_signed_by(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Tell whether ``signature`` over ``data`` was made by the node named ``peer_id``."""
    try:
        Ed25519PublicKey.from_public_bytes(public_of(peer_id)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True
