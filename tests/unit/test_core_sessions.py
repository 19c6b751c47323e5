"""Sessions between nodes: text and whole models under one step's weights, and what is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trio
from core_kit import LIMITS
from sessions_kit import B1, C1, C2, CONTEXT, DATA, ROOM_BYTES, ROSTER, Machine, World

from protocol.core import kept_sessions
from protocol.core.kept_sessions import MOST_OF_ONE
from protocol.errors import NotAllowed, Unreachable
from protocol.messages import Extend, FetchPinned, Pin, Stuck, Unpin

PROMPT = [3, 200, 41]


@pytest.fixture
def world(nursery, autojump_clock) -> World:
    return World(nursery)


async def written(
    world: World, num_new: int, meanwhile: Callable[[int], None] = lambda count: None
) -> list[int]:
    """Generate greedily; ``meanwhile`` is called before each token."""
    tokens = list(PROMPT)
    async with world.data.sessions.generation(len(tokens) + num_new) as generation:
        for count in range(num_new):
            meanwhile(count)
            tokens.append(int((await generation.next_logits(tokens)).argmax()))
    return tokens


def on_route(world: World) -> list[Machine]:
    """The holders that compute."""
    return [m for m in world.holders if any(isinstance(x, Extend) for x in m.heard)]


# --- generation ----------------------------------------------------------------------------


async def test_text_is_what_one_computer_writes_and_leaves_nothing(
    autojump_clock, world: World
) -> None:
    assert await written(world, 5) == world.expected(PROMPT, 5)
    await trio.sleep(1)
    assert world.num_kept == [0, 0, 0, 0]
    assert [m.sessions.kept.num_bytes for m in world.holders] == [0] * 4
    assert world.data.sessions._own == {}


async def test_each_token_goes_through_each_stage_once(autojump_clock, world: World) -> None:
    await written(world, 4)
    sizes = [
        (m.position, m.attempt) for h in on_route(world) for m in h.heard if isinstance(m, Extend)
    ]
    assert len(on_route(world)) == 2
    assert sorted(sizes) == sorted(2 * [(0, 0), (3, 0), (4, 0), (5, 0)])


async def test_the_weights_are_those_of_the_first_step_to_the_end(
    autojump_clock, world: World
) -> None:
    expected = world.expected(PROMPT, 5)
    assert await written(world, 5, lambda count: world.train()) == expected
    assert world.expected(PROMPT, 5) != expected


@pytest.mark.parametrize("how", ["dies", "freezes", "forgets"])
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_lost_holder_is_replaced_and_the_text_stays(
    autojump_clock, world: World, how: str, stage: int
) -> None:
    expected = world.expected(PROMPT, 5)

    def lose(count: int) -> None:
        world.train()
        if count == 2:
            victim = on_route(world)[stage]
            if how == "dies":
                victim.die()
            elif how == "freezes":
                victim.host.freeze(1000)
            else:
                victim.sessions.kept.clear()

    assert await written(world, 5, lose) == expected
    assert len(on_route(world)) == 3


async def test_without_a_holder_the_text_ends_with_an_error(autojump_clock, world: World) -> None:
    def lose_all(count: int) -> None:
        if count == 1:
            world.c1.die()
            world.c2.die()

    with pytest.raises(Unreachable, match="stage 2 is left that keeps the weights of step 1"):
        await written(world, 3, lose_all)
    await trio.sleep(1)
    assert world.num_kept[:2] == [0, 0]


async def test_a_swarm_without_a_stage_is_told_in_time(autojump_clock, world: World) -> None:
    for machine in (world.c1, world.c2):
        machine.die()
    with pytest.raises(Unreachable, match="no holder that keeps its weights"):
        await written(world, 1)
    assert trio.current_time() < 2 * LIMITS.request_s
    assert world.data.sessions._own == {}


async def test_who_has_gone_on_is_asked_for_the_step_before(autojump_clock, world: World) -> None:
    expected = world.expected(PROMPT, 3)
    for machine in world.holders:
        machine.train()  # they heard of the next step before the data node
    assert await written(world, 3) == expected


async def test_one_is_kept_waiting_until_the_holders_are_at_its_step(
    autojump_clock, world: World
) -> None:
    world.data.train()
    world.data.train()
    decision = world.decision
    world.decision = decision.model_copy(
        update={"step": 3, "digests": (world.data.ctx.state.digest, *decision.digests[1:])}
    )

    async def follow() -> None:
        await trio.sleep(3)
        for machine in (*world.holders, *world.holders):
            machine.train()
        world.decide()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        tokens = await written(world, 2)
    assert tokens == world.expected(PROMPT, 2)


async def test_a_text_longer_than_the_context_forgets_its_older_half(
    autojump_clock, world: World
) -> None:
    tokens = await written(world, 12)
    for end in range(len(PROMPT), len(tokens)):
        seen = end if end <= CONTEXT else CONTEXT // 2 + (end - CONTEXT - 1) % (CONTEXT // 2 + 1)
        assert tokens[: end + 1] == [
            *tokens[: end - seen], *world.expected(tokens[end - seen : end], 1)
        ]  # fmt: skip
    restarts = {m.attempt for h in on_route(world) for m in h.heard if isinstance(m, Extend)}
    assert restarts == {0, 1, 2}


async def test_cancelling_frees_what_the_holders_keep(
    autojump_clock, world: World, nursery
) -> None:
    scope = trio.CancelScope()

    async def write_for_ever() -> None:
        with scope:
            async with world.data.sessions.generation(5) as generation:
                await generation.next_logits(PROMPT)
                await trio.sleep_forever()

    nursery.start_soon(write_for_ever)
    await trio.sleep(2)
    assert sum(world.num_kept) == 4
    scope.cancel()
    await trio.sleep(1)
    assert world.num_kept == [0, 0, 0, 0]


async def test_a_session_lives_as_long_as_its_owner_speaks_of_it(
    autojump_clock, world: World
) -> None:
    async with world.data.sessions.generation(5):
        await trio.sleep(3 * LIMITS.pin_silence_s)
        assert world.num_kept == [1, 1, 1, 1]
        world.data.host.freeze(10_000)
        await trio.sleep(LIMITS.pin_silence_s + 2)
        assert world.num_kept == [0, 0, 0, 0]


async def test_a_dead_owners_session_ends_soon(autojump_clock, world: World) -> None:
    async with world.data.sessions.generation(5):
        world.data.die()
        await trio.sleep(LIMITS.session_silence_s + 2)
        assert world.num_kept == [0, 0, 0, 0]


async def test_no_session_lasts_for_ever(autojump_clock, world: World) -> None:
    for machine in world.holders:
        machine.sessions.kept._deadlines = LIMITS.model_copy(update={"pin_age_s": 90.0})
    async with world.data.sessions.generation(5):
        await trio.sleep(80)
        assert world.num_kept == [1, 1, 1, 1]
        await trio.sleep(12)
        assert world.num_kept == [0, 0, 0, 0]


# --- what a holder takes on ----------------------------------------------------------------


async def ask(world: World, by: Machine, **changes: object) -> tuple[str, ...]:
    """Ask the first holder of stage 1 to keep its weights; return what it refuses with."""
    fields = {
        "step": 1, "owner": by.ctx.me, "session": 1, "stage": 1, "purpose": "generate",
        "num_positions": 4,
    } | changes  # fmt: skip
    await by.network.send(B1, Pin(**fields))
    await trio.sleep(1)
    return tuple(m.refusal for m in by.heard if m.kind == "pinned")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"step": 0}, ""),
        ({"step": 5}, "not here"),
        ({"stage": 2}, "another stage"),
        ({"num_positions": CONTEXT + 1}, "within the context"),
        ({"num_positions": 0}, "within the context"),
    ],
)
async def test_what_a_holder_cannot_do_it_refuses(
    autojump_clock, world: World, changes, word: str
) -> None:
    (refusal,) = await ask(world, world.data, **changes)
    assert word in refusal
    assert bool(refusal) == bool(word)


async def test_only_data_nodes_generate_and_only_whom_the_manifest_names_exports(
    autojump_clock,
    world: World,
) -> None:
    assert "only data nodes" in (await ask(world, world.c1))[0]
    assert "does not allow" in (await ask(world, world.c1, purpose="export"))[1]
    assert world.num_kept == [0, 0, 0, 0]


async def test_number_and_memory_of_sessions_are_bounded(
    autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MOST_OF_ONE):
        await ask(world, world.data, session=number)
    assert (await ask(world, world.data, session=99))[-1] == "too many sessions"
    assert world.num_kept[0] == MOST_OF_ONE
    assert world.b1.sessions.kept.num_bytes <= ROOM_BYTES
    await world.data.network.send(B1, Unpin(step=1, owner=DATA, session=0))
    world.b1.sessions.kept._room_bytes = world.b1.sessions.kept.num_bytes
    assert "no memory" in (await ask(world, world.data, session=100))[-1]


async def test_a_stranger_neither_ends_nor_uses_a_session(autojump_clock, world: World) -> None:
    async with world.data.sessions.generation(5) as generation:
        number = generation._session.number
        await world.c1.network.send(B1, Unpin(step=1, owner=DATA, session=number))
        extend = Extend(
            step=1, owner=DATA, session=number, stage=1, attempt=7, position=0, route=(C1,)
        )
        await world.c1.network.send(B1, extend, (torch.zeros(1, 1, 4),))
        fetch = FetchPinned(step=1, owner=DATA, session=number, stage=1, chunk=0)
        await world.c1.network.send(B1, fetch)
        await trio.sleep(1)
        assert world.num_kept[0] == 1
        assert [m for m in world.c1.heard if m.kind in ("extend", "state_chunk")] == []


async def test_only_the_last_stage_answers(autojump_clock, world: World) -> None:
    async with world.data.sessions.generation(5) as generation:
        answer = Extend(
            step=1, owner=DATA, session=generation._session.number, stage=3, attempt=0, position=0,
            route=(),
        )  # fmt: skip
        for machine, num_answers in ((world.b1, 0), (world.c1, 1)):
            await machine.network.send(DATA, answer, (torch.zeros(1, 1, 4),))
            await trio.sleep(1)
            assert len(generation._session.answers) == num_answers


async def test_tokens_that_do_not_follow_are_refused(autojump_clock, world: World) -> None:
    async with world.data.sessions.generation(5) as generation:
        extend = Extend(
            step=1, owner=DATA, session=generation._session.number, stage=1, attempt=0, position=2,
            route=(C1,),
        )  # fmt: skip
        await world.data.network.send(B1, extend, (torch.zeros(1, 1, 4),))
        await trio.sleep(1)
        (stuck,) = [m for m in world.data.heard if isinstance(m, Stuck)]
        assert (stuck.peer, stuck.reason) == (B1, "the tokens do not fit")


async def test_a_flood_ends_its_senders_connection(
    autojump_clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_sessions, "OPEN_PER_SENDER", 0)
    from protocol.errors import ProtocolViolation
    from protocol.ports import Envelope

    pin = Pin(step=1, owner=DATA, session=1, stage=1, purpose="export")
    with pytest.raises(ProtocolViolation, match="more messages"):
        world.b1.sessions.on_envelope(Envelope(DATA, pin))


async def test_a_holder_neither_exports_nor_generates(autojump_clock, world: World) -> None:
    for session in (world.b1.sessions.export(), world.b1.sessions.generation(3)):
        with pytest.raises(NotAllowed):
            async with session:
                pass


async def test_before_the_swarm_begins_there_is_nothing(autojump_clock, world: World) -> None:
    world.decision = None
    with pytest.raises(Unreachable, match="has not begun"):
        async with world.data.sessions.generation(3):
            pass


async def test_a_holder_that_left_the_roster_is_not_asked(autojump_clock, world: World) -> None:
    world.decide((ROSTER[0], (B1,), (C2,)))
    async with world.data.sessions.generation(3):
        assert world.num_kept == [1, 0, 0, 1]
