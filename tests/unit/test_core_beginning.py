"""Imported weights on their way to the stages, over the simulated network."""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
import trio
from core_kit import LIMITS
from sessions_kit import World

from protocol.core.beginning import Beginning
from protocol.core.signal import Signal
from protocol.messages import StateChunk
from protocol.ports import Envelope
from protocol.simulation.toy_stage import toy_stage

CHUNK_BYTES = 20


class Disk:
    """The states of some stages, in small chunks."""

    def __init__(self, *stages: int) -> None:
        self.data: dict[int, bytes] = {}
        self.stages = stages

    async def chunk(self, stage: int, number: int) -> tuple[int, torch.Tensor] | None:
        data = self.data.get(stage, b"") if stage in self.stages else b""
        piece = data[number * CHUNK_BYTES :][:CHUNK_BYTES]
        if not piece:
            return None
        return -(-len(data) // CHUNK_BYTES), torch.frombuffer(bytearray(piece), dtype=torch.uint8)


class Imported(World):
    """The organiser has the first weights on its disk; the holders are at step 0."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__(nursery)
        self.disk = Disk(0, 1, 2)
        for stage in range(3):
            state = toy_stage(self.manifest, stage)
            state.prepare(torch.full((state.num_gradients,), 3.0), 4)
            state.apply()
            self.disk.data[stage] = state.export_state().numpy().tobytes()
        digests = tuple(sha256(self.disk.data[k]).hexdigest() for k in range(3))
        self.imported = self.manifest.model_copy(update={"initial": digests})
        for machine in self.machines:
            machine.ctx.state = toy_stage(self.manifest, machine.ctx.stage)
            disk = self.disk if machine is self.data else None
            first = Beginning(self.imported, machine.network, disk, LIMITS, machine.observer)
            machine.sessions.beginning = machine.sessions.kept._beginning = first

    async def begin(self, machine, is_late=lambda: False, changed: Signal | None = None) -> bool:
        """Whether the holder has the imported weights after a minute at most."""
        with trio.move_on_after(60):
            await machine.sessions.beginning.begin(machine.ctx, changed or Signal(), is_late)
        return machine.ctx.state.digest == self.imported.initial[machine.ctx.stage]


@pytest.fixture
def world(nursery, autojump_clock) -> Imported:
    return Imported(nursery)


async def test_everybody_begins_with_what_the_manifest_names(
    autojump_clock, world: Imported
) -> None:
    for machine in world.machines:
        assert await world.begin(machine)


async def test_who_has_no_source_waits_for_it(autojump_clock, world: Imported) -> None:
    world.disk.stages = (0, 2)
    assert not await world.begin(world.b1)
    world.disk.stages = (1,)
    assert await world.begin(world.b1)


async def test_nobody_waits_when_the_swarm_has_gone_on(autojump_clock, world: Imported) -> None:
    world.disk.stages = ()
    changed, late = Signal(), []

    async def go_on() -> None:
        await trio.sleep(3)
        late.append(True)
        changed.notify()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on)
        assert not await world.begin(world.b1, lambda: bool(late), changed)
    assert trio.current_time() < 5


async def test_wrong_weights_are_not_taken(autojump_clock, world: Imported) -> None:
    before = world.b1.ctx.state.digest
    world.disk.data[1] = world.disk.data[1][:-1] + b"\x07"
    assert not await world.begin(world.b1)
    assert world.b1.ctx.state.digest == before
    assert world.trace.find("initial_weights_wrong")


async def test_a_swarm_of_random_weights_asks_nobody(autojump_clock, world: Imported) -> None:
    plain = Beginning(world.manifest, world.b1.network, None, LIMITS, world.b1.observer)
    before = world.b1.ctx.state.digest
    await plain.begin(world.b1.ctx, Signal(), lambda: False)
    assert world.b1.ctx.state.digest == before
    assert world.data.heard == []


async def test_a_chunk_that_nobody_asked_for_is_not_taken(autojump_clock, world: Imported) -> None:
    chunk = StateChunk(step=0, stage=1, chunk=0, num_chunks=1, digest=world.imported.initial[1])
    envelope = Envelope(world.c1.ctx.me, chunk, (torch.zeros(3, dtype=torch.uint8),))
    assert not world.b1.sessions.takes_chunk(envelope)
