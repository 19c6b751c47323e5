"""The ports of the last run, so that invites and what others remember of this node stay true."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from node.config import Port
from node.files import replace_text
from node.transport.addresses import endpoint, ports_held
from protocol.errors import ResourceError

_PORTS: TypeAdapter[dict[str, Port]] = TypeAdapter(dict[str, Port])


class RememberedPorts:
    """Chooses a port where the owner fixed none: the last one if nobody else has it by now."""

    def __init__(self, path: Path, host: str, tell: Callable[[ResourceError], None]) -> None:
        self._path, self._host, self._tell = path, host, tell
        self._last = _read(path)

    def choose(self, name: str, configured: int) -> int:
        """Return the port to ask for; 0 takes any, and that is told if it was another one."""
        last = self._last.get(name, 0)
        if configured or not last:
            return configured
        try:
            with ports_held([f"/ip4/{self._host}/tcp/{last}"]):
                return last
        except ResourceError as error:
            self._tell(_taken(name, error))
            return 0

    def remember(self, name: str, addresses: Sequence[str]) -> None:
        """Keep the port of the first of a node's own full multiaddrs."""
        if addresses:
            port = endpoint(addresses[0].partition("/p2p/")[0])[1]
            self._last = {**self._last, name: port}
            replace_text(self._path, json.dumps(self._last))


def _taken(name: str, error: ResourceError) -> ResourceError:
    setting = f"{'dht' if name == 'dht' else 'listen'}_port"
    return ResourceError(
        f"{error.cause}, and this node had it in its last run: it takes another one, and invites"
        " that name the old one do not lead here any more",
        "Stop the program that has the port and start the node again, or give out the new invite;"
        f" {setting} (SHOAL_{setting.upper()}) fixes a port for good.",
    )


def _read(path: Path) -> dict[str, int]:
    try:
        return _PORTS.validate_json(path.read_text())
    except (OSError, ValidationError):
        return {}
