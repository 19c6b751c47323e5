"""A manifest with its organiser's signature."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from protocol.errors import ConfigError
from protocol.keys import NodeKey, is_signed_by
from protocol.manifest.specs import Manifest, Spec
from protocol.manifest.toml import read_tables

_SIGNED_PREFIX = b"shoal/manifest/1\n"


class SignedManifest(Spec):
    """A manifest with its organiser's signature; ``verify`` before use."""

    manifest: Manifest
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]

    def to_toml(self) -> str:
        """Return the manifest as TOML, its signature (hex) first."""
        return f'signature = "{self.signature.hex()}"\n{self.manifest.to_toml()}'

    @classmethod
    def from_toml(cls, text: str) -> SignedManifest:
        """Read a signed manifest without verifying it; raise ConfigError."""
        tables = read_tables(text)
        signature = _signature_of(tables.pop("signature", None))
        return cls(manifest=Manifest.from_tables(tables), signature=signature)

    def verify(self, swarm_id: str | None = None) -> Manifest:
        """Return the manifest if its organiser signed it (and it is ``swarm_id``'s).

        Raises ConfigError.
        """
        manifest = self.manifest
        signed = _SIGNED_PREFIX + manifest.canonical
        if not is_signed_by(manifest.organiser, signed, self.signature):
            raise ConfigError(
                f"the manifest was not signed by its organiser {manifest.organiser}",
                "It was changed after signing: the organiser signs with `shoal swarm create FILE`,"
                " all others get it from the organiser again.",
            )
        if swarm_id is not None and manifest.swarm_id != swarm_id:
            raise ConfigError(
                f"the manifest is of swarm {manifest.swarm_id}, not {swarm_id}",
                "Use the manifest and the invite of the same swarm.",
            )
        return manifest


def sign(manifest: Manifest, key: NodeKey) -> SignedManifest:
    """Sign with the organiser's key; raise ConfigError if it is another's."""
    if key.peer_id != manifest.organiser:
        raise ConfigError(
            f"this key is {key.peer_id}, the manifest's organiser is {manifest.organiser}",
            "Sign with the organiser's key, or name this node as organiser.",
        )
    signature = key.sign(_SIGNED_PREFIX + manifest.canonical)
    return SignedManifest(manifest=manifest, signature=signature)


def _signature_of(text: object) -> bytes:
    if text is None:
        raise ConfigError("the manifest is not signed", "Its organiser must sign it.")
    try:
        signature = bytes.fromhex(str(text))
    except ValueError:
        raise ConfigError("the manifest's signature is not hexadecimal") from None
    if len(signature) != 64:
        raise ConfigError(f"the manifest's signature has {len(signature)} bytes, not 64")
    return signature
