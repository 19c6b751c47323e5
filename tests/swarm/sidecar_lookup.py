"""Lets a lying node answer a lookup, and prints what the side-car's DHT believes of it.

A program of its own, because hivemind and libp2p cannot share the test's process.
"""

from __future__ import annotations

import asyncio
import json
import math
import time

from node.sidecar.child import dht

# Entered by child.dht without the rest of hivemind.
from hivemind.proto import dht_pb2  # isort: skip

NOW = time.time()


class OnlyGood:
    """A validator that knows one good value."""

    def validate(self, record: object) -> bool:
        return record.value == b"good"


class Liar:
    """A node that claims any expiry and size for what it returns."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        self.entries = entries

    async def rpc_find(self, request: object, timeout: float) -> object:
        dictionary = dht.DictionaryDHTValue(maxsize=1000)
        for subkey, value in self.entries.items():
            dictionary.store(subkey, value, NOW + 60)
        value = dht.ShoalDHT.serializer.dumps(dictionary)
        result = dht_pb2.FindResult(
            type=dht_pb2.FOUND_DICTIONARY, value=value, expiration_time=math.inf
        )
        return dht_pb2.FindResponse(results=[result])


async def lookup(entries: dict[str, bytes]) -> dict[str, object] | None:
    protocol = dht.ShoalDHT(_initialized_with_create=True)
    protocol.record_validator, protocol.wait_timeout = OnlyGood(), 1.0
    protocol.rpc_semaphore, protocol.node_info = asyncio.Semaphore(1), dht_pb2.NodeInfo()
    protocol.get_stub = lambda peer: Liar(entries)
    key = dht.DHTID.generate(source="nodes")
    answer = await protocol.call_find("peer", [key])
    found, _ = answer[key]
    if found is None:
        return None
    return {
        "subkeys": [subkey for subkey, _ in found.value.items()],
        "lifetime": round(found.expiration_time - NOW),
        "is_limited": found.value.maxsize != math.inf,
    }


async def main() -> None:
    cases = [{"a": b"good", "b": b"bad"}, {"a": b"good"}, {"b": b"bad"}, {}]
    print(json.dumps([await lookup(entries) for entries in cases]))


asyncio.run(main())
