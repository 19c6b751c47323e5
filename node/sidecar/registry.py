"""The daemon's Registry port: this node's signed records in the DHT, and everybody else's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import trio

from node.sidecar import channel
from node.sidecar.supervisor import Sidecar
from protocol.errors import ConfigError, ProtocolViolation, SidecarError, Unreachable
from protocol.keys import NodeKey
from protocol.manifest import SignedManifest
from protocol.records import MAX_LIFETIME_S, NodeRecord, open_record, sign

# Signatures that are checked without a break: some milliseconds.
_AT_ONCE = 32
_OWN_REMEMBERED = 64  # records of this process, more than can be alive at once


class SidecarRegistry:
    """Signs, numbers and publishes this node's records; reads and checks those of others."""

    def __init__(
        self,
        sidecar: Sidecar,
        key: NodeKey,
        swarm: str,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._sidecar, self._key, self._swarm = sidecar, key, swarm
        self._wall_time = wall_time
        self._sequence = 0
        self._published: tuple[bytes, NodeRecord] | None = None
        self._opened: dict[bytes, NodeRecord] = {}
        self._manifest: str | None = None
        self._manifest_expires_at = 0.0
        self._own: deque[bytes] = deque(maxlen=_OWN_REMEMBERED)
        # Hears of records under this node's key that this process did not sign.
        self.on_foreign: Callable[[NodeRecord], None] | None = None
        sidecar.after_restart = self._republish

    async def publish(self, record: NodeRecord) -> None:
        """Store ``record`` with this node's next sequence number and its side-car's PeerID.

        Raises SidecarError if the DHT did not take it.
        """
        now = self._wall_time()
        # By the clock, so that a restarted node goes on where it stopped without keeping count.
        self._sequence = max(self._sequence + 1, record.sequence, int(now * 1000))
        self._heed_clock(now)
        last_expiry = self._published[1].expires_at if self._published else 0.0
        record = record.model_copy(
            update={
                "sequence": self._sequence,
                "sidecar_id": self._sidecar.peer_id,
                # The DHT replaces a value only by one that expires later.
                "expires_at": max(record.expires_at, last_expiry + 0.001),
            }
        )
        self._published = sign(record, self._key), record
        self._own.append(self._published[0])
        await self._store(self._published[0])
        if self._manifest and self._manifest_expires_at < now + MAX_LIFETIME_S / 2:
            await self.publish_manifest(self._manifest)

    def _heed_clock(self, now: float) -> None:
        """Begin anew if the clock was set back so far that nobody takes what must expire later.

        Nobody else has the records of before: they expired too far ahead of the other clocks.
        """
        if self._published and self._published[1].expires_at >= now + MAX_LIFETIME_S:
            self._published = None
            self._sidecar.restart("the clock was set back")
        if self._manifest_expires_at > now + MAX_LIFETIME_S:
            self._manifest_expires_at = 0.0

    async def nodes(self) -> Sequence[NodeRecord]:
        """The valid records of all nodes of the swarm, this one's included."""
        found = await self._sidecar.call(channel.Lookup(), channel.Records)
        now, opened = self._wall_time(), {}
        for number, data in enumerate(found.records):
            if number % _AT_ONCE == 0:  # whoever floods the DHT must not hold up the sessions
                await trio.lowlevel.checkpoint()
            try:
                opened[data] = self._opened.get(data) or open_record(
                    data, swarm=self._swarm, now=now
                )
            except ProtocolViolation:
                continue
        # Most records are those of the last look: their signatures are not checked again.
        self._opened = {d: r for d, r in opened.items() if r.expires_at > now}
        self._catch_up()
        for data, record in self._opened.items():
            if record.peer_id == self._key.peer_id and data not in self._own and self.on_foreign:
                self.on_foreign(record)
        return tuple(self._opened.values())

    async def num_witnesses(self) -> int:
        """How many other nodes gave this node's latest record back; registered means at least 1."""
        if self._published is None:
            return 0
        request = channel.Confirm(record=self._published[0])
        return (await self._sidecar.call(request, channel.Confirmed)).num_holding

    async def publish_manifest(self, text: str) -> None:
        """Store the signed manifest (TOML) now and renew it at later publications."""
        self._manifest = text
        expires_at = self._wall_time() + MAX_LIFETIME_S * 0.9
        request = channel.StoreManifest(text=text, expires_at=expires_at)
        if not (await self._sidecar.call(request, channel.Stored)).ok:
            raise SidecarError("the DHT did not take the manifest")
        self._manifest_expires_at = expires_at

    async def fetch_manifest(self) -> SignedManifest:
        """The swarm's manifest, signature and hash checked; Unreachable if no node has it."""
        found = await self._sidecar.call(channel.FetchManifest(), channel.ManifestText)
        if found.text is None:
            raise Unreachable(f"nobody has the manifest of swarm {self._swarm[:12]}")
        try:
            signed = SignedManifest.from_toml(found.text)
            signed.verify(self._swarm)
        except ConfigError as error:
            raise Unreachable(f"the DHT returned a wrong manifest: {error.cause}") from error
        return signed

    async def _store(self, data: bytes) -> None:
        if not (await self._sidecar.call(channel.Publish(record=data), channel.Stored)).ok:
            raise SidecarError("the DHT did not take the node's record")

    def _catch_up(self) -> None:
        """Go on after the highest number that others know, if the clock was set back."""
        own = (r.sequence for r in self._opened.values() if r.peer_id == self._key.peer_id)
        self._sequence = max(self._sequence, *own, 0)

    async def _republish(self) -> None:
        """A new side-car holds nothing: give it what it had. The next refresh follows anyway."""
        try:
            if self._manifest:
                await self.publish_manifest(self._manifest)
            if self._published and self._published[1].expires_at > self._wall_time():
                await self._store(self._published[0])
        except SidecarError:
            return
