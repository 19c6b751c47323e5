"""Finding peers: publish this node's record, read those of the others, introduce them.

The registry only discovers candidates; who belongs to a step is decided elsewhere. This node
counts as registered when another peer says that it read the record (heartbeats carry that).

A look-up costs every node of the DHT a little, for ever. So a node that keeps finding the same
peers looks ever less often, and at once when it hears of one that it cannot place.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.errors import SidecarError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.ports import Network, Observer, Registry
from protocol.records import NodeRecord


class Discovery:
    """Keeps the record fresh and the network informed."""

    def __init__(
        self,
        key: NodeKey,
        manifest: Manifest,
        network: Network,
        registry: Registry,
        observer: Observer,
        settings: NodeSettings,
    ) -> None:
        self._key, self._manifest = key, manifest
        self._network, self._registry, self._observer = network, registry, observer
        self._settings = settings
        self._published_at: float | None = None
        self._published = (-2, False)
        self.stage = -1 if settings.stage is None else settings.stage
        self.is_draining = False
        self.sequence = 0
        self.known: dict[PeerId, NodeRecord] = {}
        self._pause_s = settings.deadlines.discovery_s
        self._hurried = Signal()

    async def run(self) -> None:
        """Publish and look up for ever; a side-car that fails is counted and tried again."""
        while True:
            try:
                await self._publish_if_due()
                await self._look_up()
            except SidecarError as error:
                self._observer.count("errors", code=error.code)
            await self._rest()

    def hear_of(self, peers: Iterable[PeerId]) -> None:
        """Look soon if one of these peers' records is not known yet."""
        if any(p not in self.known and p != self._key.peer_id for p in peers):
            self._hurry()

    def announce(self, *, stage: int | None = None, is_draining: bool = False) -> None:
        """Publish soon that this node serves ``stage`` now, or that it is leaving."""
        self.stage = self.stage if stage is None else stage
        self.is_draining = self.is_draining or is_draining
        self._hurry()

    def _hurry(self) -> None:
        self._pause_s = self._settings.deadlines.discovery_s
        self._hurried.notify()

    async def _rest(self) -> None:
        began = trio.current_time()
        while (rest_s := began + self._pause_s - trio.current_time()) > 0:
            with trio.move_on_after(rest_s):
                await self._hurried.wait()

    async def _publish_if_due(self) -> None:
        now = trio.current_time()
        refresh = self._settings.deadlines.record_refresh_s
        is_fresh = self._published_at is not None and now - self._published_at < refresh
        if is_fresh and self._published == (self.stage, self.is_draining):
            return
        wall = self._settings.wall_clock()
        self.sequence = max(self.sequence + 1, int(wall * 1000))
        record = NodeRecord(
            swarm=self._manifest.swarm_id,
            peer_id=self._key.peer_id,
            sidecar_id=self._settings.sidecar_id or self._key.derive("sidecar").peer_id,
            stage=self.stage,
            addresses=self._settings.addresses(),
            sequence=self.sequence,
            expires_at=wall + self._settings.deadlines.record_lifetime_s,
            protocol_version=self._manifest.protocol_version,
            is_draining=self.is_draining,
        )
        await self._registry.publish(record)
        self._published_at, self._published = now, (record.stage, record.is_draining)

    async def _look_up(self) -> None:
        before = set(self.known)
        for record in await self._registry.nodes():
            if record.peer_id != self._key.peer_id:
                self.known[record.peer_id] = record
                self._network.introduce(record.peer_id, record.addresses)
        wall = self._settings.wall_clock()
        self.known = {p: r for p, r in self.known.items() if r.expires_at > wall}
        deadlines = self._settings.deadlines
        is_settled = self.known and before >= set(self.known)
        longer_s = min(2 * self._pause_s, deadlines.discovery_rest_s)
        self._pause_s = longer_s if is_settled else deadlines.discovery_s
