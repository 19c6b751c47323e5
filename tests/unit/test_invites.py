"""The organiser's invite in the files where volunteers look for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config import NodeConfig
from node.invites import publish_invite, read_invite, withdraw_invite
from node.paths import StatePaths
from protocol.errors import ResourceError
from protocol.invite import Invite
from protocol.keys import NodeKey

PEER = NodeKey(b"o" * 32).peer_id
INVITE = Invite(
    swarm_id="a" * 64, organiser=PEER, seeds=(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",)
)  # fmt: skip


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    paths = StatePaths(tmp_path / "state")
    paths.create()
    return paths


def test_the_organiser_writes_where_it_is_told_and_a_volunteer_reads(
    paths: StatePaths, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    organiser = NodeConfig(role="organiser", invite_file=shared)
    publish_invite(paths, organiser, INVITE)
    assert paths.invite.read_text() == shared.read_text() == INVITE.encode() + "\n"
    assert read_invite(NodeConfig(invite_file=shared)) == INVITE.encode()
    withdraw_invite(paths, organiser)
    assert not paths.invite.exists()
    assert read_invite(NodeConfig(invite_file=shared)) is None
    assert list(tmp_path.iterdir()) == [paths.root]


def test_a_volunteer_leaves_the_organisers_file_alone(paths: StatePaths, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_text("theirs")
    withdraw_invite(paths, NodeConfig(invite_file=shared))
    assert shared.read_text() == "theirs"


def test_without_a_file_nothing_is_read(tmp_path: Path) -> None:
    assert read_invite(NodeConfig()) is None
    (tmp_path / "empty").touch()
    assert read_invite(NodeConfig(invite_file=tmp_path / "empty")) is None


def test_a_file_that_cannot_be_had_is_named(paths: StatePaths, tmp_path: Path) -> None:
    nowhere = tmp_path / "no" / "invite"
    with pytest.raises(ResourceError, match=f"cannot write the invite to {nowhere}") as caught:
        publish_invite(paths, NodeConfig(role="organiser", invite_file=nowhere), INVITE)
    assert "SHOAL_INVITE_FILE" in caught.value.hint
    with pytest.raises(ResourceError, match="cannot read the invite"):
        read_invite(NodeConfig(invite_file=tmp_path))
    with pytest.raises(ResourceError, match="cannot remove"):
        withdraw_invite(paths, NodeConfig(role="organiser", invite_file=tmp_path))
