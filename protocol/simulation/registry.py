"""The simulated registry: an in-memory table that answers late and shows records late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from protocol.errors import SidecarError
from protocol.keys import PeerId
from protocol.records import NodeRecord
from protocol.simulation.host import VirtualHost


@dataclass
class VirtualRegistry:
    """The table that all nodes share. ``clock`` is wall time in seconds.

    A call takes ``delay_s``; a record is seen by others ``staleness_s`` after it was stored.
    """

    clock: Callable[[], float]
    delay_s: float = 0.05
    staleness_s: float = 0.0
    is_down: bool = False
    _shown: dict[PeerId, NodeRecord] = field(default_factory=dict)
    _stored: list[tuple[float, NodeRecord]] = field(default_factory=list)

    def attach(self, host: VirtualHost) -> SimulatedRegistry:
        """Return a node's adapter."""
        return SimulatedRegistry(host, self)

    def store(self, record: NodeRecord) -> None:
        """Keep a record, to be shown when it has spread."""
        self._stored.append((self.clock() + self.staleness_s, record))

    def shown(self) -> list[NodeRecord]:
        """Return what can be seen now: of each node the newest record that has not expired."""
        now = self.clock()
        for at, record in self._stored:
            old = self._shown.get(record.peer_id)
            if at <= now and (old is None or record.sequence > old.sequence):
                self._shown[record.peer_id] = record
        self._stored = [(at, record) for at, record in self._stored if at > now]
        return [record for record in self._shown.values() if record.expires_at > now]


class SimulatedRegistry:
    """One node's Registry port."""

    def __init__(self, host: VirtualHost, table: VirtualRegistry) -> None:
        self._host, self._table = host, table

    async def publish(self, record: NodeRecord) -> None:
        """Store this node's record; SidecarError while the registry is down."""
        await self._call()
        self._table.store(record)

    async def nodes(self) -> Sequence[NodeRecord]:
        """Return the records that have spread and not expired."""
        await self._call()
        return self._table.shown()

    async def _call(self) -> None:
        await trio.sleep(self._table.delay_s)
        await self._host.awake()
        if self._table.is_down:
            raise SidecarError("the registry did not answer")
