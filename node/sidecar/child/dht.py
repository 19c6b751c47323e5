"""hivemind's DHT, loaded without the rest of hivemind, and guarded against its peers."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

# ``import hivemind`` loads torch and all averagers: 2 s and 250 MB more for each side-car. The DHT
# needs none of it, so the packages are entered without running their __init__, and the few names
# that hivemind.utils would re-export are put where the DHT's modules look for them.
_LEAVES = {
    "logging": ("get_logger",),
    "serializer": ("MSGPackSerializer", "SerializerBase"),
    "timed_storage": ("DHTExpiration", "TimedStorage", "ValueWithExpiration", "get_dht_time"),
}


def _enter_packages() -> None:
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("hivemind is not installed")
    for part in ("", "dht", "utils"):
        package = types.ModuleType(f"hivemind.{part}".rstrip("."))
        package.__path__ = [f"{spec.submodule_search_locations[0]}/{part}"]
        sys.modules[package.__name__] = package
        if part:
            setattr(sys.modules["hivemind"], part, package)
    for leaf, names in _LEAVES.items():
        module = importlib.import_module(f"hivemind.utils.{leaf}")
        for name in names:
            setattr(sys.modules["hivemind.utils"], name, getattr(module, name))


if not TYPE_CHECKING:
    _enter_packages()

import hivemind.dht.node  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure  # noqa: E402
from hivemind.utils.multiaddr import Multiaddr  # noqa: E402
from hivemind.utils.timed_storage import ValueWithExpiration  # noqa: E402

__all__ = [
    "DHTID",
    "P2P",
    "ControlFailure",
    "DHTNode",
    "DictionaryDHTValue",
    "Multiaddr",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
]


class ShoalDHT(DHTProtocol):  # type: ignore[misc]  # hivemind is untyped
    """hivemind's protocol, except that one bad entry no longer hides all the good ones.

    Upstream discards a whole dictionary for one invalid entry, and believes whatever expiry and
    size limit the answering node claims for it: each lets one node blind all others.
    """

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            for subkey, (value, expires_at) in list(dictionary.items()):
                tag = self.serializer.dumps(subkey)
                if not self._validate_record(key_bytes, tag, value, expires_at):
                    del dictionary[subkey]
        return True

    async def call_find(self, peer: Any, keys: Collection[Any]) -> Any:
        """Return what ``peer`` knows, with dictionaries rebuilt from their valid entries."""
        output = await super().call_find(peer, keys)
        for key, (found, nearest) in (output or {}).items():
            if found is not None and isinstance(found.value, DictionaryDHTValue):
                output[key] = _rebuilt(found.value), nearest
        return output


def _rebuilt(dictionary: Any) -> Any:
    """Return a fresh dictionary that expires with its last entry, or None if there is none."""
    clean, last = DictionaryDHTValue(), -math.inf
    for subkey, (value, expires_at) in dictionary.items():
        clean.store(subkey, value, expires_at)
        last = max(last, expires_at)
    return ValueWithExpiration(clean, last) if clean else None


# DHTNode.create names its protocol class as a global of its module.
hivemind.dht.node.DHTProtocol = ShoalDHT
