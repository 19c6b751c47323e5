"""Five hundred failures of a kind in one process: memory, tasks and files are as before."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import pytest
import torch
import trio
from core_kit import KEYS, PEERS, bench_of
from step_kit import decision_of

from node.transport import Libp2pNetwork
from protocol.averaging import AgreedAverager, ExactAverager, Round
from protocol.core.transfer import Joiner
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerError, PeerGone, SidecarError
from protocol.keys import NodeKey, PeerId
from protocol.messages import FetchState, Message, ReducePart, StateChunk
from protocol.ports import Envelope, Tensor
from protocol.wire import Limits

LIMITS = Deadlines()
WARM_UP, FAILURES = 50, 500
# One object of each failure that stays would be 500, one tensor of each 50 MB.
OBJECTS_SLACK, MIB_SLACK = 250, 20
TENSOR_ELEMENTS = 25_000


@dataclass(frozen=True)
class Footprint:
    """What this process holds."""

    objects: int
    rss_mib: float
    tasks: int
    files: int

    @classmethod
    def now(cls) -> Footprint:
        gc.collect()
        rss_mib = psutil.Process().memory_info().rss / 2**20
        tasks = trio.lowlevel.current_statistics().tasks_living
        # trio keeps the scopes of past deadlines, in tuples, until there are a thousand
        objects = sum(type(o) not in (tuple, trio.CancelScope) for o in gc.get_objects())
        return cls(objects, rss_mib, tasks, len(os.listdir("/proc/self/fd")))


async def assert_leaves_nothing(fail: Callable[[int], Awaitable[None]]) -> None:
    """Fail some times, then five hundred times more; compare before and after those."""
    for number in range(WARM_UP):
        await fail(number)
    before = Footprint.now()
    for number in range(FAILURES):
        await fail(number)
    after = Footprint.now()
    assert after.objects - before.objects < OBJECTS_SLACK
    assert after.rss_mib - before.rss_mib < MIB_SLACK
    assert after.tasks <= before.tasks
    assert after.files <= before.files


class Silent:
    """An Observer of nothing."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


# --- averaging -------------------------------------------------------------------------------


class Deaf:
    """A network on which nothing is answered; every second peer is gone altogether."""

    def __init__(self) -> None:
        self.peer_id, self.is_gone = PEERS[0], False

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_gone:
            raise PeerGone("it is gone")


class Broken:
    """A reducer that never averages."""

    async def ready(self) -> tuple[str, ...]:
        await trio.lowlevel.checkpoint()
        return ("/ip4/127.0.0.1/tcp/1",)

    async def reduce(
        self, values: Tensor, group: str, peers: Sequence[str], num_members: int
    ) -> None:
        raise SidecarError("no")

    def renew(self) -> None: ...


@pytest.mark.parametrize("kind", ["exact", "agreed"])
async def test_failed_rounds(autojump_clock, kind: str) -> None:
    network = Deaf()
    averager = (
        ExactAverager(network, LIMITS)
        if kind == "exact"
        else AgreedAverager(network, LIMITS, Broken(), Silent())
    )
    gradient = torch.ones(TENSOR_ELEMENTS)

    async def fail(number: int) -> None:
        network.is_gone = number % 2 == 0 or kind == "agreed"
        early = ReducePart(step=number, term=7, stage=1, shard=0, place=1, num_microbatches=1)
        if kind == "exact":  # a part that nobody will ask for: its round is never held
            averager.deliver(Envelope(PEERS[1], early, (torch.ones(TENSOR_ELEMENTS),)))
        with pytest.raises(AveragingFailed):
            await averager.total(Round(number, 1, 0, 1, tuple(PEERS[:2])), gradient, 1)

    await assert_leaves_nothing(fail)


# --- dialling --------------------------------------------------------------------------------


@asynccontextmanager
async def running(number: int) -> AsyncIterator[Libp2pNetwork]:
    node = Libp2pNetwork(
        NodeKey(bytes([number]) * 32), "ab" * 32, limits=Limits(1 << 20), observer=Silent(),
        rng=random.Random(1),
    )  # fmt: skip
    async with node.running(["/ip4/127.0.0.1/tcp/0"]):
        yield node


def closed_ports(num: int) -> list[int]:
    """Ports at which nobody listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


async def test_failed_dials() -> None:
    """Nobody listens there, or every fifth time somebody else does."""
    stranger = NodeKey(bytes([3]) * 32).peer_id
    async with running(1) as node, running(2) as other:
        refused = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}" for port in closed_ports(2)]
        wrong = other.addresses[0].replace(other.peer_id, stranger)

        async def fail(number: int) -> None:
            # a new address is tried at once, without the pause after a failure
            address = wrong if number % 5 == 4 else refused[number % 2]
            node.introduce(stranger, [address])
            with pytest.raises(PeerGone):
                await node.send(stranger, FetchState(step=number, stage=1, chunk=0))

        await assert_leaves_nothing(fail)


# --- state transfer --------------------------------------------------------------------------


class Liars:
    """Donors that are gone, have nothing, or give bytes that are not the state."""

    def __init__(self) -> None:
        self.peer_id, self.mode = PEERS[1], 0
        self.joiner: Joiner | None = None

    def rtt_s(self, peer: PeerId) -> float | None:
        return None

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await trio.lowlevel.checkpoint()
        if self.mode == 0:
            raise PeerGone("it is gone")
        assert isinstance(message, FetchState)
        assert self.joiner is not None
        has_it = self.mode == 2
        reply = StateChunk(
            step=message.step, stage=1, chunk=message.chunk, num_chunks=2 if has_it else 0,
            digest="1" * 64 if has_it else None,
        )  # fmt: skip
        given = (torch.zeros(4 * TENSOR_ELEMENTS, dtype=torch.uint8),) if has_it else ()
        self.joiner.deliver(Envelope(peer, reply, given))


async def test_failed_state_transfers(nursery, autojump_clock) -> None:
    network = Liars()
    ctx = bench_of(nursery, KEYS[1], 1).ctx
    ctx.network, ctx.observer = network, Silent()
    joiner = network.joiner = Joiner(ctx)
    roster = [PEERS[:1], PEERS[2:4], PEERS[4:5]]
    decision = decision_of(roster, step=1, digests=("0" * 64, "1" * 64, "2" * 64))

    async def fail(number: int) -> None:
        network.mode = number % 3
        with pytest.raises(PeerError):
            await joiner.fetch(decision)

    await assert_leaves_nothing(fail)
