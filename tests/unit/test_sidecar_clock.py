"""What a node publishes while its wall clock jumps: always records that others can take."""

from __future__ import annotations

from collections import Counter

import pytest
from step_kit import KEYS, SWARM

from node.sidecar import channel
from node.sidecar.registry import SidecarRegistry
from protocol.records import MAX_LIFETIME_S, NodeRecord, open_record

ME = KEYS[0]
START, LIFETIME_S, HOUR_S = 1_800_000_000.0, 30.0, 3600.0


class Wall:
    """A wall clock that somebody sets."""

    now = START

    def __call__(self) -> float:
        return self.now


class StoringSidecar:
    """Judges a record as the DHT does: not too far ahead, and later than the last of this life."""

    def __init__(self, wall: Wall) -> None:
        self.wall, self.peer_id = wall, ME.derive("sidecar").peer_id
        self.stored: list[NodeRecord] = []
        self.last_expiry = 0.0
        self.counts: Counter[str] = Counter()

    async def call(self, request: channel.Packet, _reply: type) -> channel.Stored:
        if isinstance(request, channel.StoreManifest):
            self.counts["manifests"] += 1
            return channel.Stored(ok=True)
        assert isinstance(request, channel.Publish)
        record = open_record(request.record, swarm=SWARM, now=self.wall())
        is_later = record.expires_at > self.last_expiry
        if is_later:
            self.last_expiry = record.expires_at
            self.stored.append(record)
        return channel.Stored(ok=is_later)

    def restart(self, _reason: str) -> None:
        self.counts["restarts"] += 1
        self.last_expiry = 0.0


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def sidecar(wall: Wall) -> StoringSidecar:
    return StoringSidecar(wall)


@pytest.fixture
def registry(wall: Wall, sidecar: StoringSidecar) -> SidecarRegistry:
    return SidecarRegistry(sidecar, ME, SWARM, wall)


def record(wall: Wall) -> NodeRecord:
    return NodeRecord(
        swarm=SWARM, peer_id=ME.peer_id, sidecar_id=ME.peer_id, stage=1,
        addresses=("/ip4/192.0.2.1/tcp/4001",), sequence=int(wall() * 1000),
        expires_at=wall() + LIFETIME_S, protocol_version=1,
    )  # fmt: skip


@pytest.mark.parametrize("jump_s", [-2 * HOUR_S, -HOUR_S, -60.0, -1.0, 1.0, 60.0, HOUR_S])
async def test_records_are_taken_before_and_after_a_jump(
    jump_s: float, wall: Wall, sidecar: StoringSidecar, registry: SidecarRegistry
) -> None:
    """No storm either: a side-car is replaced once, and only if nothing else would help."""
    for count in range(20):
        if count == 10:
            wall.now += jump_s
        await registry.publish(record(wall))
        wall.now += 5
    assert len(sidecar.stored) == 20
    numbers = [stored.sequence for stored in sidecar.stored]
    assert numbers == sorted(set(numbers))
    assert sidecar.counts["restarts"] == int(jump_s <= -HOUR_S)


async def test_the_manifest_is_renewed_after_the_clock_was_set_back(
    wall: Wall, sidecar: StoringSidecar, registry: SidecarRegistry
) -> None:
    await registry.publish_manifest("text")
    wall.now -= HOUR_S
    for _ in range(3):
        await registry.publish(record(wall))
        wall.now += 5
    assert sidecar.counts["manifests"] == 2
    assert MAX_LIFETIME_S < HOUR_S
