"""The invite: one line of text that leads a volunteer into a swarm.

``shoal1:`` and the base64url form of four checksum bytes and a JSON body. It is no secret and
proves nothing: the manifest it leads to must hash to ``swarm_id`` and be signed by ``organiser``.
"""

from __future__ import annotations

import base64
import binascii
import re
from hashlib import sha256
from typing import Annotated

from multiaddr import Multiaddr
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from protocol.errors import ConfigError, VersionMismatch
from protocol.manifest import explain
from protocol.manifest.specs import Peer

_PREFIX = "shoal1:"
_MAX_CHARS = 16 * 1024
_CHECKSUM_BYTES = 4
_HINT = (
    "Copy the whole line that the organiser's `shoal swarm run` prints; it also lies in the "
    "organiser's state directory, in the file invite."
)


def _checked_address(value: str) -> str:
    if Multiaddr(value).get_peer_id() is None:
        raise ValueError(f"{value!r} does not end with /p2p/ and a PeerID")
    return value


Address = Annotated[str, Field(max_length=200), AfterValidator(_checked_address)]


class Invite(BaseModel):
    """Where a swarm is found. ``seeds`` are side-cars of the DHT, ``nodes`` data-plane addresses.

    ``expires_at`` is wall time in seconds since the epoch; None never expires.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    swarm_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    organiser: Peer
    seeds: Annotated[tuple[Address, ...], Field(min_length=1, max_length=16)]
    nodes: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    expires_at: Annotated[int, Field(ge=0, lt=2**53)] | None = None

    def encode(self) -> str:
        """Return the text that ``decode`` reads."""
        body = self.model_dump_json(exclude_none=True).encode()
        return _PREFIX + base64.urlsafe_b64encode(_checksum(body) + body).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, now: float) -> Invite:
        """Read an invite at wall time ``now``; raise ConfigError that names what is wrong."""
        try:
            invite = cls.model_validate_json(_body_of(text.strip()))
        except ValidationError as error:
            raise ConfigError(f"the invite is malformed: {explain(error)}", _HINT) from error
        if invite.expires_at is not None and invite.expires_at <= now:
            hours = (now - invite.expires_at) / 3600
            raise ConfigError(f"the invite expired {hours:.1f} hours ago", _HINT)
        return invite


def _body_of(text: str) -> bytes:
    """Return the JSON body whose checksum is right."""
    kind = re.match(r"shoal(\d+):", text)
    if kind is None:
        raise ConfigError("this is not an invite: it does not begin with shoal1:", _HINT)
    if kind[0] != _PREFIX:
        raise VersionMismatch(f"the invite is of kind shoal{kind[1]}, this shoal reads shoal1")
    payload = text.removeprefix(_PREFIX)
    if len(payload) > _MAX_CHARS:
        raise ConfigError(f"the invite is malformed: {len(payload)} characters", _HINT)
    try:
        # altchars is strict together with validate: stray spaces and quotes are not skipped
        data = base64.b64decode(payload + "=" * (-len(payload) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        cause = "the invite is malformed: a part is missing or changed"
        raise ConfigError(cause, _HINT) from error
    checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if checksum != _checksum(body):
        raise ConfigError("the invite's checksum is wrong: a part is missing or changed", _HINT)
    return body


def _checksum(body: bytes) -> bytes:
    return sha256(body).digest()[:_CHECKSUM_BYTES]
