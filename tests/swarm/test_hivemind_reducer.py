"""hivemind's averager in its own processes: on the daemon's buffer, replaced when it fails."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import torch
import trio

from node.sidecar.averager import HivemindReducer, ReducerOptions
from node.sidecar.shared_buffer import SharedBuffer
from node.sidecar.sweep import sweep
from protocol.averaging import AgreedAverager, Round
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerGone, ResourceError
from protocol.keys import NodeKey, PeerId
from protocol.messages import Message
from protocol.ports import Envelope, Tensor
from protocol.simulation.trace import Trace, TracingObserver

PEERS = tuple(sorted(NodeKey(bytes([k]) * 32).peer_id for k in range(1, 4)))
OPTIONS = ReducerOptions(listen=("/ip4/127.0.0.1/tcp/0",), maps_port=False)
LIMITS = Deadlines()
LENGTH = 300_001
RELATIVE_ERROR = 1e-6  # measured: 4e-8


@dataclass
class Members:
    """The members of a stage in this process; each has its averager's processes."""

    peers: tuple[PeerId, ...]
    length: int
    averagers: dict[PeerId, AgreedAverager] = field(default_factory=dict)
    reducers: list[HivemindReducer] = field(default_factory=list)
    observers: list[TracingObserver] = field(default_factory=list)
    step: int = 0
    lost: PeerId | None = None

    @property
    def next_round(self) -> Round:
        """All members of the step that comes next."""
        return Round(self.step, 1, 0, 1, self.peers)

    async def send(
        self, sender: PeerId, peer: PeerId, message: Message, tensors: Sequence[Tensor]
    ) -> None:
        await trio.sleep(0.001)
        if self.lost in (sender, peer):
            raise PeerGone("it is dead")
        copies = tuple(tensor.clone() for tensor in tensors)
        self.averagers[peer].deliver(Envelope(sender, message, copies))

    async def round(self, mishap: Callable[[], Awaitable[None]] | None = None) -> None:
        """One round, during which something may happen; all must have the sum, bit for bit."""
        chance = torch.Generator().manual_seed(self.step)
        gradients = [torch.randn(self.length, generator=chance) for _ in self.peers]
        totals: list[tuple[Tensor, int]] = []
        round_ = self.next_round

        async def take_part(index: int) -> None:
            averager = self.averagers[self.peers[index]]
            totals.append(await averager.total(round_, gradients[index], index + 1))

        async with trio.open_nursery() as nursery:
            for index in range(len(self.peers)):
                nursery.start_soon(take_part, index)
            if mishap:
                await mishap()
        self.step += 1
        exact = sum(gradient.double() for gradient in gradients)
        for total, count in totals:
            assert torch.equal(total, totals[0][0])
            assert count == sum(range(1, len(self.peers) + 1))
            assert float((total - exact).norm() / exact.norm()) < RELATIVE_ERROR

    def processes_of(self, index: int) -> list[psutil.Process]:
        """The averager of a member, hivemind's forks and p2pd."""
        pid = self.reducers[index].pid
        assert pid is not None
        averager = psutil.Process(pid)
        return [averager, *averager.children(recursive=True)]


@dataclass(frozen=True)
class Side:
    """As much of a Network as the averager uses."""

    peer_id: PeerId
    members: Members

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await self.members.send(self.peer_id, peer, message, tensors)


@asynccontextmanager
async def stage_of(num: int, length: int = LENGTH) -> AsyncIterator[Members]:
    stage = Members(PEERS[:num], length)
    async with trio.open_nursery() as nursery:
        for peer in stage.peers:
            observer = TracingObserver(peer, Trace())
            reducer = HivemindReducer(OPTIONS, LIMITS, observer, random.Random(0))
            nursery.start_soon(reducer.run)
            stage.reducers.append(reducer)
            stage.observers.append(observer)
            stage.averagers[peer] = AgreedAverager(Side(peer, stage), LIMITS, reducer, observer)
        yield stage
        last = [p for i, r in enumerate(stage.reducers) if r.pid for p in stage.processes_of(i)]
        nursery.cancel_scope.cancel()
    assert await gone(last)


async def gone(processes: Sequence[psutil.Process]) -> bool:
    """Whether all end within a few seconds."""
    with trio.move_on_after(10):
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            await trio.sleep(0.1)
        return True
    return False


async def test_members_agree_and_an_averager_that_is_killed_is_replaced() -> None:
    """The kernel kills it and hivemind's forks would live on; all that was left of it is gone."""
    async with stage_of(2) as stage:
        await stage.round()
        await stage.round()
        first = stage.processes_of(0)
        assert len(first) >= 4  # averager, DHT, p2pd, DecentralizedAverager
        os.kill(first[0].pid, signal.SIGKILL)
        await stage.round()
        assert await gone(first)
        assert stage.processes_of(0)[0].pid != first[0].pid
    assert not list(Path("/dev/shm").glob(f"torch_{os.getpid()}_shoal*"))
    assert not any(name.split(".")[0] == "hivemind" for name in sys.modules)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["averager", "fork"])
async def test_a_frozen_averager_is_replaced(which: str) -> None:
    """Its member lives and says so; hivemind's limits end the round for the other."""
    async with stage_of(2) as stage:
        await stage.round()
        frozen = stage.processes_of(1)
        # torch's keeper of shared memory has a session of its own and ends when its clients do
        forks = [p for p in frozen[1:] if p.name() != "torch_shm_manager"]
        victims = frozen[:1] if which == "averager" else forks

        async def freeze() -> None:
            for process in victims:
                process.suspend()

        await stage.round(freeze)
        assert stage.processes_of(1)[0].pid != frozen[0].pid
        assert await gone(frozen)


@pytest.mark.slow
async def test_a_member_that_dies_in_the_all_reduce_is_named_and_nobody_has_a_mixture() -> None:
    """hivemind tells the survivors that all went well, while some parts lack the dead one's."""
    async with stage_of(3, 6_000_000) as stage:
        await stage.round()
        dead = stage.processes_of(2)
        (p2pd,) = (process for process in dead if process.name() == "p2pd")
        before = p2pd.io_counters().read_chars
        missing: dict[int, frozenset[str]] = {}

        async def take_part(index: int) -> None:
            averager = stage.averagers[PEERS[index]]
            try:
                await averager.total(stage.next_round, torch.ones(stage.length), 1)
            except AveragingFailed as error:
                missing[index] = error.missing

        async with trio.open_nursery() as survivors, trio.open_nursery() as victim:
            survivors.start_soon(take_part, 0)
            survivors.start_soon(take_part, 1)
            victim.start_soon(take_part, 2)
            with trio.fail_after(LIMITS.averaging_s):
                # of a round's traffic through p2pd, which is some times the buffer's bytes
                while p2pd.io_counters().read_chars - before < 4 * stage.length:
                    await trio.sleep(0.001)
            stage.lost = PEERS[2]
            os.killpg(dead[0].pid, signal.SIGKILL)
            victim.cancel_scope.cancel()
        assert missing == {0: {PEERS[2]}, 1: {PEERS[2]}}
        stage.peers = PEERS[:2]
        await stage.round()


def test_a_buffer_is_one_memory_in_both_processes_and_is_swept() -> None:
    buffer = SharedBuffer(1000)
    assert buffer.path.stat().st_mode & 0o777 == 0o600
    buffer.tensor.fill_(3.0)
    again = torch.from_file(str(buffer.path), shared=True, size=1000, dtype=torch.float32)
    again[7] = 8.0
    assert buffer.tensor[7] == 8.0
    assert buffer.path not in sweep()  # its owner lives
    buffer.close()
    assert not buffer.path.exists()


def test_no_room_for_a_buffer_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no room for"):
        SharedBuffer(2**50, tmp_path)
    with pytest.raises(ResourceError, match="no room for"):
        SharedBuffer(10, tmp_path / "missing")
    assert not list(tmp_path.iterdir())
