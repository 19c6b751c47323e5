"""Export between nodes: the states of one step, whatever donors do, for whom it is allowed."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import pytest
import torch
import trio
from sessions_kit import World

from protocol.core import exporting, kept_sessions
from protocol.errors import NotAllowed, StateMismatch


@pytest.fixture
def world(nursery, autojump_clock) -> World:
    return World(nursery)


class Taker:
    """Puts the pieces together."""

    def __init__(self) -> None:
        self.data = b""
        self.num_pieces = 0
        self.before_piece: Callable[[int], None] = lambda count: None

    async def __call__(self, piece: torch.Tensor, is_first: bool) -> None:
        self.before_piece(self.num_pieces)
        self.num_pieces += 1
        self.data = (b"" if is_first else self.data) + piece.numpy().tobytes()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exporting, kept_sessions):
        monkeypatch.setattr(module, "CHUNK_BYTES", 20)


async def test_all_stages_come_from_one_step_though_training_goes_on(
    autojump_clock, world: World, small_chunks: None
) -> None:
    digests = world.decision.digests
    async with world.data.sessions.export() as export:
        for stage in range(3):
            taker = Taker()
            taker.before_piece = lambda count: world.train() if count < 3 else None
            assert await export.collect(stage, taker) == digests[stage]
            assert sha256(taker.data).hexdigest() == digests[stage]
            assert taker.num_pieces > 3
    assert world.decision.digests != digests
    await trio.sleep(1)
    assert world.num_kept == [0, 0, 0, 0]


@pytest.mark.parametrize("how", ["dies", "lies"])
async def test_another_holder_gives_what_one_does_not(
    autojump_clock, world: World, small_chunks: None, how: str
) -> None:
    def disturb(count: int) -> None:
        if count == 2:
            first = min((world.b1, world.b2), key=lambda m: m.ctx.me)
            if how == "dies":
                first.die()
            else:
                kept = next(iter(first.sessions.kept._kept.values()))
                kept.state = world.data.ctx.state.pin(1, is_whole=True)

    digests = world.decision.digests
    async with world.data.sessions.export() as export:
        taker = Taker()
        taker.before_piece = disturb
        await export.collect(1, taker)
        assert sha256(taker.data).hexdigest() == digests[1]


async def test_a_state_that_nobody_gives_right_is_an_error(
    autojump_clock, world: World, small_chunks: None
) -> None:
    async with world.data.sessions.export() as export:
        for machine in (world.b1, world.b2):
            kept = next(iter(machine.sessions.kept._kept.values()))
            kept.state = world.data.ctx.state.pin(1, is_whole=True)
        with pytest.raises(StateMismatch, match="stage 1"):
            await export.collect(1, Taker())


@pytest.mark.parametrize(
    ("who", "is_allowed"),
    [("nobody", False), ("organiser", True), ("authorities", True), ("data_nodes", True)],
)
async def test_the_manifest_says_who_exports(
    nursery, autojump_clock, who: str, is_allowed: bool
) -> None:
    world = World(nursery, export=who)
    if is_allowed:
        async with world.data.sessions.export() as export:
            assert export.step == 1
    else:
        with pytest.raises(NotAllowed, match="lets nobody export"):
            async with world.data.sessions.export():
                pass
