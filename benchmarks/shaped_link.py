"""Two network namespaces behind one bridge, the router, whose rate can be set while it is used.

Needs root and iproute2. The router's queue is `tc tbf`: first in, first out, and what would wait
longer than ``QUEUE_MS`` is dropped, as in a home router of the better kind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

LEFT, RIGHT = "10.214.0.1", "10.214.0.2"
QUEUE_MS = 50
_BURST = "16kb"


@dataclass(frozen=True)
class ShapedLink:
    """Names of the namespaces; ``left`` has the address LEFT and ``right`` has RIGHT."""

    left: str
    right: str
    middle: str

    def limit(self, mbit_per_s: int | None) -> None:
        """Set the rate both ways; None takes the limit away."""
        for port in ("to-left", "to-right"):
            with suppress(subprocess.CalledProcessError):  # there may be none yet
                self._tc("del", "dev", port, "root")
            if mbit_per_s is not None:
                shape = ("rate", f"{mbit_per_s}mbit", "burst", _BURST, "latency", f"{QUEUE_MS}ms")
                self._tc("add", "dev", port, "root", "tbf", *shape)

    def _tc(self, *arguments: str) -> None:
        _run("tc", "-n", self.middle, "qdisc", *arguments)


def is_possible() -> bool:
    """Whether this computer lets us make namespaces."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


@contextmanager
def shaped_link() -> Iterator[ShapedLink]:
    """Make a link without a limit; take it away at the end."""
    link = ShapedLink(*(f"shoal-bench-{side}-{os.getpid()}" for side in ("l", "r", "m")))
    with ExitStack() as stack:
        for namespace in (link.left, link.right, link.middle):
            _run("ip", "netns", "add", namespace)
            stack.callback(_run, "ip", "netns", "del", namespace)
        _ip(link.middle, "link", "add", "bridge", "type", "bridge")
        _ip(link.middle, "link", "set", "bridge", "up")
        _join(link.middle, link.left, "to-left", LEFT)
        _join(link.middle, link.right, "to-right", RIGHT)
        yield link


def _join(middle: str, end: str, port: str, address: str) -> None:
    _ip(middle, "link", "add", port, "type", "veth", "peer", "name", "eth", "netns", end)
    _ip(middle, "link", "set", port, "master", "bridge", "up")
    _ip(end, "address", "add", f"{address}/24", "dev", "eth")
    for device in ("eth", "lo"):
        _ip(end, "link", "set", device, "up")


def _ip(namespace: str, *arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
