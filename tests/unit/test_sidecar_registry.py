"""What the daemon believes of the DHT, however much is in it."""

from __future__ import annotations

from typing import Any

import trio
from fuzz_kit import example

from node.sidecar import channel
from node.sidecar.registry import SidecarRegistry
from protocol.keys import NodeKey
from protocol.records import NodeRecord, sign

SWARM, NOW = "ab" * 32, 1_800_000_000.0


class Full:
    """A side-car whose DHT is full of nodes that do not exist, and of nonsense."""

    after_restart: Any = None

    def __init__(self, num_records: int) -> None:
        self._records = tuple(self._record(number) for number in range(num_records))

    def _record(self, number: int) -> bytes:
        key = NodeKey(number.to_bytes(32, "big"))
        if number % 5 == 0:
            return key.seed
        fields = {"peer_id": key.peer_id, "swarm": SWARM, "expires_at": NOW + 30}
        return sign(NodeRecord(**(example(NodeRecord).model_dump() | fields)), key)

    async def call(self, request: channel.Request, _: type[channel.Packet]) -> channel.Records:
        assert isinstance(request, channel.Lookup)
        return channel.Records(records=self._records)


async def test_a_full_dht_holds_nothing_else_up() -> None:
    registry = SidecarRegistry(Full(200), NodeKey(bytes([9]) * 32), SWARM, lambda: NOW)  # type: ignore[arg-type]
    turns = 0

    async def live() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(live)
        assert len(await registry.nodes()) == 160
        nursery.cancel_scope.cancel()
    assert turns >= 2
