"""A node asks for the ports that it had before, unless its owner or another program objects."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from node.ports import RememberedPorts
from protocol.errors import ResourceError

HOST = "127.0.0.1"
PEER = "12D3KooWDBGrSgXPgt9KfdLV1MH4Mng49Ao7fJpahKSUaTkZWS3Y"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ports.json"


def unexpected(error: ResourceError) -> None:
    pytest.fail(error.cause)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def test_the_last_port_is_asked_for_again(file: Path) -> None:
    told = unexpected
    port = free_port()
    before = RememberedPorts(file, HOST, told)
    assert before.choose("dht", 0) == 0
    before.remember("dht", [f"/ip4/{HOST}/tcp/{port}/p2p/{PEER}"])
    before.remember("node", [])
    after = RememberedPorts(file, HOST, told)
    assert (after.choose("dht", 0), after.choose("node", 0)) == (port, 0)
    assert after.choose("dht", 4001) == 4001


@pytest.mark.parametrize(
    ("name", "setting"), [("dht", "SHOAL_DHT_PORT"), ("node", "SHOAL_LISTEN_PORT")]
)
def test_a_port_that_another_program_took_is_given_up_and_told(
    file: Path, name: str, setting: str
) -> None:
    """It changes the invite: whoever has the old one does not get in any more."""
    errors: list[ResourceError] = []
    told = errors.append
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        RememberedPorts(file, HOST, told).remember(name, [f"/ip4/{HOST}/tcp/{port}/p2p/{PEER}"])
        assert RememberedPorts(file, HOST, told).choose(name, 0) == 0
    (error,) = errors
    assert f"port {port} of {HOST} is already in use" in error.cause
    assert "invites that name the old one do not lead here" in error.cause
    assert setting in error.hint


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"dht": 70000}', '{"dht": "x"}'])
def test_a_damaged_file_is_as_good_as_none(file: Path, text: str) -> None:
    told = unexpected
    file.write_text(text)
    assert RememberedPorts(file, HOST, told).choose("dht", 0) == 0
