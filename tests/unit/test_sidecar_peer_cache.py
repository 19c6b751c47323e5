"""Peers met before are found again after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.sidecar.peer_cache import MAX_PEERS, PeerCache
from protocol.keys import NodeKey


def address(index: int, port: int = 4001) -> str:
    return f"/ip4/192.0.2.{index}/tcp/{port}/p2p/{NodeKey(bytes([index]) * 32).peer_id}"


def test_newest_come_first_and_survive(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    cache = PeerCache(path)
    cache.remember([address(1), address(2)])
    cache.remember([address(3), address(1, port=4002)])
    assert PeerCache(path).addresses == (address(3), address(1, port=4002), address(2))


def test_is_bounded_and_refuses_rubbish() -> None:
    cache = PeerCache(None)
    cache.remember(["/unix/tmp/x", "", *(address(i) for i in range(40))])
    assert cache.addresses == tuple(address(i) for i in range(MAX_PEERS))


@pytest.mark.parametrize("text", ["", "{", "{}", "[1, null]", '["/unix/etc"]', "null"])
def test_a_damaged_file_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "peers.json"
    path.write_text(text)
    assert PeerCache(path).addresses == ()
