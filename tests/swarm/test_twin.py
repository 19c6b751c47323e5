"""Two nodes with one key: the DHT shows the second where the first is."""

from __future__ import annotations

import random

import pytest
import trio
from test_sidecar import Member, eventually, start

from node.entrance import Entrance
from node.transport.network import Libp2pNetwork
from node.transport.probe import Prober
from protocol.errors import IdentityError
from protocol.wire import Limits

LISTEN = ["/ip4/127.0.0.1/tcp/0"]


def network_of(member: Member) -> Libp2pNetwork:
    return Libp2pNetwork(
        member.key,
        member.swarm,
        limits=Limits(max_tensor_bytes=1024),
        observer=member.notes,
        rng=random.Random(1),
    )


def entrance_of(member: Member) -> Entrance:
    prober = Prober(member.key, member.swarm, member.deadlines, member.notes)
    return Entrance(
        member.key.peer_id, None, member.sidecar, member.registry, prober, member.deadlines,
        member.notes,
    )  # fmt: skip


async def test_the_second_finds_the_first_and_a_successor_finds_nobody() -> None:
    async with trio.open_nursery() as nursery:
        seed = Member(1)
        await start(nursery, seed)
        first = Member(2, seed.sidecar.addresses)
        await start(nursery, first)
        network = network_of(first)
        async with network.running(LISTEN):
            await first.registry.publish(first.record(addresses=network.addresses))
            second = Member(2, seed.sidecar.addresses)
            await start(nursery, second)
            await eventually(second.registry.nodes, 30.0)
            with pytest.raises(IdentityError, match=network.addresses[0]):
                await entrance_of(second).refuse_twin()
        # The record is still there, but nobody answers: so it is an earlier life's.
        assert await second.registry.nodes()
        await entrance_of(second).refuse_twin()
        nursery.cancel_scope.cancel()
