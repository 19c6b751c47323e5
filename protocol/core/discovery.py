"""Finding peers: publish this node's record, read those of the others, introduce them.

The registry only discovers candidates; who belongs to a step is decided elsewhere. This node
counts as registered when another peer says that it read the record (heartbeats carry that).

A look-up costs every node of the DHT a little, for ever. So a node that keeps finding the same
peers looks ever less often, and at once when it hears of one that it cannot place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import trio

from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.errors import SidecarError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.ports import Network, Observer, Registry
from protocol.records import MAX_COST_MS, MAX_FLOWS, Claim, NodeRecord


class Load(NamedTuple):
    """What a record tells of a node's work: flows it can carry and carries, and their cost."""

    capacity: int = 0
    used: int = 0
    cost_s: float | None = None


class Discovery:
    """Keeps the record fresh and the network informed; ``load`` is asked at each publication."""

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
        self._published: tuple[int, bool, Claim | None] = (-2, False, None)
        self.stage = -1 if settings.stage is None else settings.stage
        self.is_draining = False
        self.claim: Claim | None = None
        self.load: Callable[[], Load] = Load
        self.sequence = 0
        self.known: dict[PeerId, NodeRecord] = {}
        self._pause_s = settings.deadlines.discovery_s
        self._hurried = Signal()
        self._num_begun = self._num_ended = 0
        self._is_readable = False
        self._looked = Signal()

    async def run(self) -> None:
        """Publish and look up for ever; a side-car that fails is counted and tried again."""
        while True:
            self._num_begun += 1
            try:
                await self._publish_if_due()
                await self._look_up()
                self._is_readable = True
            except SidecarError as error:
                self._is_readable = False
                self._observer.count("errors", code=error.code)
            self._num_ended = self._num_begun
            self._looked.notify()
            await self._rest()

    async def fresh_look(self) -> bool:
        """Publish what is new and look soon; return whether the registry could be read."""
        wanted = self._num_begun + 1
        self._hurry()
        await self._looked.until(lambda: self._num_ended >= wanted)
        return self._is_readable

    def room_of(self, peer: PeerId) -> int | None:
        """The flows that a holder says it can carry."""
        record = self.known.get(peer)
        return record.capacity if record is not None and record.stage > 0 else None

    def hear_of(self, peers: Iterable[PeerId]) -> None:
        """Look soon if one of these peers' records is not known yet."""
        if any(p not in self.known and p != self._key.peer_id for p in peers):
            self._hurry()

    def announce(self, *, stage: int | None = None, is_draining: bool = False) -> None:
        """Publish soon that this node serves ``stage`` now, or that it is leaving."""
        self.stage = self.stage if stage is None else stage
        self.is_draining = self.is_draining or is_draining
        self._hurry()

    def put_claim(self, claim: Claim | None) -> None:
        """Publish soon that this node is about to serve a stage, or that it is not any more."""
        if claim != self.claim:
            self.claim = claim
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
        if is_fresh and self._published == (self.stage, self.is_draining, self.claim):
            return
        wall = self._settings.wall_clock()
        self.sequence = max(self.sequence + 1, int(wall * 1000))
        load = self.load()
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
            claim=self.claim,
            capacity=min(MAX_FLOWS, load.capacity),
            used=min(MAX_FLOWS, load.used),
            cost_ms=_milliseconds(load.cost_s),
        )
        await self._registry.publish(record)
        self._published_at = now
        self._published = record.stage, record.is_draining, record.claim

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


def _milliseconds(cost_s: float | None) -> int | None:
    return None if cost_s is None else min(MAX_COST_MS, round(cost_s * 1000))
