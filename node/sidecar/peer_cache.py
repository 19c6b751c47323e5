"""Side-cars met before, kept on disk: the way back in when no seed of the invite answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from node.files import replace_text

MAX_PEERS = 16
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[\w.:-]{1,100}/tcp/\d{1,5}/p2p/\w{40,64}")


class PeerCache:
    """The most recent side-car addresses, newest first; without a path, in memory only."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._addresses = _read(path) if path else ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """At most ``MAX_PEERS`` full multiaddrs."""
        return self._addresses

    def remember(self, addresses: Sequence[str]) -> None:
        """Put ``addresses`` first; one address for each peer."""
        newest: dict[str, str] = {}
        for address in (*addresses, *self._addresses):
            if _ADDRESS.fullmatch(address):
                newest.setdefault(address.rpartition("/")[2], address)
        kept = tuple(newest.values())[:MAX_PEERS]
        # Connections are listed in any order: only a new member is worth a write.
        if set(kept) == set(self._addresses):
            return
        self._addresses = kept
        if self._path:
            _write(self._path, kept)


def _read(path: Path) -> tuple[str, ...]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return ()
    if not isinstance(found, list):
        return ()
    return tuple(a for a in found if isinstance(a, str) and _ADDRESS.fullmatch(a))[:MAX_PEERS]


def _write(path: Path, addresses: tuple[str, ...]) -> None:
    with suppress(OSError):  # a full disk costs the memory of some peers, not the node
        replace_text(path, json.dumps(addresses))
