"""A node asks for the ports that it had before, unless its owner or another program objects."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from node.ports import RememberedPorts

HOST = "127.0.0.1"
PEER = "12D3KooWDBGrSgXPgt9KfdLV1MH4Mng49Ao7fJpahKSUaTkZWS3Y"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ports.json"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def test_the_last_port_is_asked_for_again(file: Path) -> None:
    port = free_port()
    before = RememberedPorts(file, HOST)
    assert before.choose("dht", 0) == 0
    before.remember("dht", [f"/ip4/{HOST}/tcp/{port}/p2p/{PEER}"])
    before.remember("node", [])
    after = RememberedPorts(file, HOST)
    assert (after.choose("dht", 0), after.choose("node", 0)) == (port, 0)
    assert after.choose("dht", 4001) == 4001


def test_a_port_that_another_program_took_is_given_up(file: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
        RememberedPorts(file, HOST).remember("dht", [f"/ip4/{HOST}/tcp/{port}/p2p/{PEER}"])
        assert RememberedPorts(file, HOST).choose("dht", 0) == 0


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"dht": 70000}', '{"dht": "x"}'])
def test_a_damaged_file_is_as_good_as_none(file: Path, text: str) -> None:
    file.write_text(text)
    assert RememberedPorts(file, HOST).choose("dht", 0) == 0
