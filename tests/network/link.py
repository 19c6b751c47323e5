"""Two network namespaces on one bridge, whose link can be cut without either end being told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

LEFT, RIGHT = "10.213.0.1", "10.213.0.2"


@dataclass(frozen=True)
class Link:
    """Names of the namespaces; ``left`` has the address LEFT and ``right`` has RIGHT."""

    left: str
    right: str
    middle: str

    def cut(self) -> None:
        """Take the right end off the bridge: its carrier stays, and every packet is lost."""
        _ip("-n", self.middle, "link", "set", "to-right", "nomaster")

    def heal(self) -> None:
        """Put it back."""
        _ip("-n", self.middle, "link", "set", "to-right", "master", "bridge")


@contextmanager
def linked() -> Iterator[Link]:
    """Make a link; skip the test where no namespace can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the `ip` command (iproute2)")
    link = Link(*(f"shoal-{side}-{os.getpid()}" for side in ("left", "right", "middle")))
    with ExitStack() as stack:
        for namespace in (link.left, link.right, link.middle):
            try:
                _ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"root may not make network namespaces here: {error.stderr.strip()}")
            stack.callback(_ip, "netns", "del", namespace)
        _ip("-n", link.middle, "link", "add", "bridge", "type", "bridge")
        _ip("-n", link.middle, "link", "set", "bridge", "up")
        _join(link.middle, link.left, "to-left", LEFT)
        _join(link.middle, link.right, "to-right", RIGHT)
        yield link


def _join(middle: str, end: str, port: str, address: str) -> None:
    peer = ("peer", "name", "eth", "netns", end)
    _ip("-n", middle, "link", "add", port, "type", "veth", *peer)
    _ip("-n", middle, "link", "set", port, "master", "bridge", "up")
    _ip("-n", end, "address", "add", f"{address}/24", "dev", "eth")
    _ip("-n", end, "link", "set", "eth", "up")
    _ip("-n", end, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
