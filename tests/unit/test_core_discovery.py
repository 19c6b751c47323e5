"""How often a node looks into the registry: often while it learns, seldom when all is known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from step_kit import KEYS, manifest_of

from protocol.core.discovery import Discovery
from protocol.core.settings import NodeSettings
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.records import NodeRecord
from protocol.simulation.trace import Trace, TracingObserver

ME, FRIEND, STRANGER = KEYS[:3]
MANIFEST = manifest_of(2)
LIMITS = Deadlines()


class Addresses:
    """A network that only learns addresses."""

    def __init__(self) -> None:
        self.introduced: set[PeerId] = set()

    def introduce(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self.introduced.add(peer)


class CountingRegistry:
    """A registry that notes when it is asked and what it is given."""

    def __init__(self) -> None:
        self.records: dict[PeerId, NodeRecord] = {}
        self.looks: list[float] = []
        self.published: list[NodeRecord] = []

    async def publish(self, record: NodeRecord) -> None:
        self.published.append(record)

    async def nodes(self) -> Sequence[NodeRecord]:
        self.looks.append(trio.current_time())
        return tuple(self.records.values())

    def add(self, key: NodeKey) -> None:
        self.records[key.peer_id] = NodeRecord(
            swarm=MANIFEST.swarm_id,
            peer_id=key.peer_id,
            sidecar_id=key.peer_id,
            stage=1,
            addresses=("/ip4/127.0.0.1/tcp/4001",),
            sequence=1,
            expires_at=1e9,
            protocol_version=1,
            is_draining=False,
        )


@pytest.fixture
def registry() -> CountingRegistry:
    return CountingRegistry()


@pytest.fixture
def discovery(registry: CountingRegistry) -> Discovery:
    settings = NodeSettings(
        deadlines=LIMITS, wall_clock=lambda: 0.0, addresses=lambda: ("/ip4/127.0.0.1/tcp/1",)
    )
    return Discovery(ME, MANIFEST, Addresses(), registry, TracingObserver("n", Trace()), settings)


async def test_a_node_alone_keeps_looking(
    discovery: Discovery, registry: CountingRegistry, autojump_clock
) -> None:
    with trio.move_on_after(60):
        await discovery.run()
    assert len(registry.looks) == 60


async def test_looks_grow_rare_when_all_is_known(
    discovery: Discovery, registry: CountingRegistry, autojump_clock
) -> None:
    registry.add(FRIEND)
    with trio.move_on_after(100):
        await discovery.run()
    pauses = [b - a for a, b in zip(registry.looks, registry.looks[1:], strict=False)]
    assert pauses[0] == pytest.approx(LIMITS.discovery_s)
    assert pauses[-1] == pytest.approx(LIMITS.discovery_rest_s)


async def test_an_unknown_name_ends_the_rest(
    discovery: Discovery, registry: CountingRegistry, autojump_clock
) -> None:
    registry.add(FRIEND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.run)
        await trio.sleep(registry_settles_s())
        discovery.hear_of([ME.peer_id, FRIEND.peer_id])
        before = len(registry.looks)
        await trio.sleep(LIMITS.discovery_s)
        assert len(registry.looks) == before
        registry.add(STRANGER)
        discovery.hear_of([STRANGER.peer_id])
        await trio.sleep(LIMITS.discovery_s)
        assert STRANGER.peer_id in discovery.known
        nursery.cancel_scope.cancel()


async def test_news_of_its_own_are_published_at_once(
    discovery: Discovery, registry: CountingRegistry, autojump_clock
) -> None:
    registry.add(FRIEND)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(discovery.run)
        await trio.sleep(registry_settles_s())
        discovery.announce(stage=2)
        await trio.sleep(LIMITS.discovery_s)
        assert registry.published[-1].stage == 2
        discovery.announce(is_draining=True)
        await trio.sleep(LIMITS.discovery_s)
        assert registry.published[-1].is_draining
        nursery.cancel_scope.cancel()


def registry_settles_s() -> float:
    """So long that a look was just made and the next one is ``discovery_rest_s`` away."""
    return 1 + 2 + 4 + 8 + 8 + 0.5
