"""Which addresses a node publishes."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest
from multiaddr import Multiaddr

from node.transport.addresses import dialable
from protocol.keys import NodeKey, PeerId

PEER: PeerId = NodeKey(b"a" * 32).peer_id
EVERYWHERE = Multiaddr("/ip4/0.0.0.0/tcp/4001")


@pytest.fixture(autouse=True)
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interfaces of a container on a bridge."""

    def address(ip: str) -> SimpleNamespace:
        return SimpleNamespace(family=socket.AF_INET, address=ip)

    interfaces = {"lo": [address("127.0.0.1")], "eth0": [address("172.18.0.3")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)


def test_a_wildcard_becomes_the_interfaces_loopback_last() -> None:
    assert dialable([EVERYWHERE], PEER) == (
        f"/ip4/172.18.0.3/tcp/4001/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}",
    )


def test_an_announced_host_hides_the_containers_addresses() -> None:
    assert dialable([EVERYWHERE], PEER, "192.0.2.7") == (f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",)


def test_one_listener_has_one_address() -> None:
    listening = [Multiaddr("/ip4/10.1.2.3/tcp/5")]
    assert dialable(listening, PEER) == (f"/ip4/10.1.2.3/tcp/5/p2p/{PEER}",)
