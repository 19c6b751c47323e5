"""The invite: round trip, and an error that names what is wrong."""

from __future__ import annotations

import base64
import json
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.errors import ConfigError, VersionMismatch
from protocol.invite import Invite
from protocol.keys import NodeKey

KEY = NodeKey(bytes(32))
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{KEY.peer_id}"
INVITE = Invite(
    swarm_id="ab" * 32,
    organiser=KEY.peer_id,
    seeds=(ADDRESS, f"/dns4/seed.example.org/tcp/4001/p2p/{KEY.peer_id}"),
    nodes=(ADDRESS,),
    expires_at=2_000,
)
TEXT = INVITE.encode()


def packed(body: dict[str, Any]) -> str:
    """An invite with a right checksum around any body."""
    data = json.dumps(body).encode()
    return "shoal1:" + base64.urlsafe_b64encode(sha256(data).digest()[:4] + data).decode()


def test_round_trip() -> None:
    assert Invite.decode(TEXT, now=1_999) == INVITE
    assert TEXT.startswith("shoal1:")
    assert TEXT.isprintable()


def test_spaces_around_are_forgiven() -> None:
    assert Invite.decode(f"  {TEXT}\n", now=0) == INVITE


def test_an_invite_without_expiry_never_expires() -> None:
    endless = INVITE.model_copy(update={"expires_at": None})
    assert Invite.decode(endless.encode(), now=1e12) == endless


@pytest.mark.parametrize("now", [2_000, 9_200])
def test_an_expired_invite_is_refused(now: float) -> None:
    with pytest.raises(ConfigError, match=f"expired {(now - 2000) / 3600:.1f} hours ago"):
        Invite.decode(TEXT, now=now)


@pytest.mark.parametrize("text", ["", "hello", "shoal:abcd", "http://x/shoal1:", "SHOAL1:abc"])
def test_other_text_is_no_invite(text: str) -> None:
    with pytest.raises(ConfigError, match="not an invite"):
        Invite.decode(text, now=0)


def test_another_kind_is_another_version() -> None:
    with pytest.raises(VersionMismatch, match="shoal2"):
        Invite.decode(TEXT.replace("shoal1", "shoal2"), now=0)


@given(st.integers(8, len(TEXT) - 1))
def test_a_cut_invite_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"checksum|malformed"):
        Invite.decode(TEXT[:length], now=0)


@given(st.integers(7, len(TEXT) - 2), st.sampled_from("AZaz09-_ \n'\""))
def test_a_changed_character_is_noticed(place: int, character: str) -> None:
    changed = TEXT[:place] + character + TEXT[place + 1 :]
    if changed != TEXT:
        with pytest.raises(ConfigError, match=r"checksum|malformed"):
            Invite.decode(changed, now=0)


def test_spaces_inside_are_not_forgiven() -> None:
    with pytest.raises(ConfigError, match="malformed"):
        Invite.decode(TEXT[:40] + " " + TEXT[40:], now=0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"swarm_id": "ab"}, "swarm_id"),
        ({"organiser": "12D3"}, "organiser"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["/ip4/300.1.1.1/tcp/1"]}, "seeds.0"),
        ({"nodes": ["/ip4/192.0.2.7/tcp/1"]}, "does not end with /p2p/"),
        ({"extra": 1}, "extra"),
        ({"expires_at": -1}, "expires_at"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str) -> None:
    body = {**INVITE.model_dump(mode="json"), **change}
    with pytest.raises(ConfigError) as caught:
        Invite.decode(packed(body), now=0)
    assert field in caught.value.cause


def test_an_organiser_cannot_make_a_wrong_one() -> None:
    with pytest.raises(ValidationError):
        Invite(swarm_id="ab" * 32, organiser=KEY.peer_id, seeds=("nowhere",))


def test_endless_text_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ConfigError, match="100000 characters"):
        Invite.decode("shoal1:" + "A" * 100_000, now=0)
