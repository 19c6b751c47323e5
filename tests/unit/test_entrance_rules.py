"""The way into a swarm: who waits, who is turned away, and who may turn a node away."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import cast

import pytest
import trio
from test_transport_network import QUICK, SWARM, Recorder, key

from node.entrance import ClockWatch, Entrance, TwinWatch, judge_answer
from node.sidecar.registry import SidecarRegistry
from node.sidecar.supervisor import Sidecar
from node.transport.probe import Answered, Prober
from protocol.errors import (
    ClockError,
    IdentityError,
    SidecarError,
    Unreachable,
    VersionMismatch,
)
from protocol.invite import Invite
from protocol.keys import PeerId
from protocol.manifest import SignedManifest
from protocol.records import NodeRecord

HERE = f"/ip4/10.0.0.1/tcp/4001/p2p/{key(1).peer_id}"
INVITE = Invite(swarm_id=SWARM, organiser=key(9).peer_id, seeds=(HERE,), nodes=(HERE,))
MANIFEST = cast(SignedManifest, object())


class World:
    """A side-car, a registry and a prober whose answers the test sets."""

    def __init__(self) -> None:
        self.unjoined = 0  # how many tries find no seed
        self.records: list[NodeRecord] = []
        self.answer: Answered | None = None
        self.asked: list[tuple[PeerId, tuple[str, ...]]] = []
        self.on_foreign = None
        self.observer = Recorder()

    async def wait_joined(self, limit_s: float) -> None:
        if self.unjoined:
            self.unjoined -= 1
            await trio.sleep(limit_s)
            raise Unreachable(f"no seed of the swarm answered ({HERE})")

    async def fetch_manifest(self) -> SignedManifest:
        return MANIFEST

    async def nodes(self) -> Sequence[NodeRecord]:
        return self.records

    async def greet(self, peer: PeerId, addresses: Sequence[str]) -> Answered | None:
        self.asked.append((peer, tuple(addresses)))
        return self.answer

    def entrance(self, invite: Invite | None = INVITE, *, retries: bool = True) -> Entrance:
        sidecar, registry = cast(Sidecar, self), cast(SidecarRegistry, self)
        return Entrance(
            key(1).peer_id, invite, sidecar, registry, cast(Prober, self), QUICK, self.observer,
            retries=retries,
        )  # fmt: skip

    def told(self) -> list[str]:
        return [str(fields["cause"]) for _, fields in self.observer.events if "cause" in fields]


def record(sequence: int, number: int = 1) -> NodeRecord:
    return NodeRecord(
        swarm=SWARM,
        peer_id=key(number).peer_id,
        sidecar_id=key(number).peer_id,
        stage=1,
        addresses=(HERE,),
        sequence=sequence,
        expires_at=time.time() + 30,
        protocol_version=1,
    )


async def test_who_is_alone_goes_on_and_says_which_seed_how_long_and_when_next(
    autojump_clock: trio.testing.MockClock,
) -> None:
    world = World()
    world.unjoined = 4
    assert await world.entrance().find_manifest(None) is MANIFEST
    pauses = [float(text.split("next try in ")[1].removesuffix(" s")) for text in world.told()]
    assert len(pauses) == 4
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1]
    assert all(HERE in text and "tried for" in text for text in world.told())


async def test_without_retries_it_gives_up(autojump_clock: trio.testing.MockClock) -> None:
    world = World()
    world.unjoined = 1
    with pytest.raises(Unreachable, match="no seed"):
        await world.entrance(retries=False).find_manifest(MANIFEST)


async def test_the_organiser_waits_for_nobody() -> None:
    world = World()
    world.unjoined = math.inf  # type: ignore[assignment]
    assert await world.entrance(invite=None).find_manifest(MANIFEST) is MANIFEST


async def test_a_twin_that_answers_turns_the_second_away() -> None:
    world = World()
    world.records = [record(5, number=2), record(5)]
    world.answer = Answered(HERE, 0.0, None)
    with pytest.raises(IdentityError, match=HERE):
        await world.entrance().refuse_twin()
    assert world.asked == [(key(1).peer_id, (HERE,))]


async def test_a_record_whose_signer_is_gone_turns_nobody_away() -> None:
    world = World()
    world.records = [record(5)]
    await world.entrance().refuse_twin()
    assert world.on_foreign is not None
    world.on_foreign(record(5))  # a stranger, or a slow node, sends it again
    assert world.observer.events == []


async def test_a_silent_twin_gives_itself_away_by_its_next_record() -> None:
    world, now_ms = World(), int(time.time() * 1000)
    world.records = [record(now_ms - 1000)]
    await world.entrance().refuse_twin()
    assert world.on_foreign is not None
    with pytest.raises(IdentityError, match=HERE):
        world.on_foreign(record(now_ms + 5000))


def test_a_twin_that_came_later_is_told_of_once() -> None:
    observer = Recorder()
    watch, now_ms = TwinWatch(observer), int(time.time() * 1000)
    for after_ms in (5000, 10_000):
        watch.judge(record(now_ms + after_ms))
    assert [(n, f["code"]) for n, f in observer.events] == [("identity_used_twice", "identity")]


async def test_an_unsure_side_car_turns_nobody_away() -> None:
    world = World()

    async def fail() -> Sequence[NodeRecord]:
        raise SidecarError("it is restarting")

    world.nodes = fail  # type: ignore[method-assign]
    await world.entrance().refuse_twin()


@pytest.mark.parametrize(
    ("offset_s", "refusal", "error", "told"),
    [
        (40.0, "clock", ClockError, "40 s behind the organiser's"),
        (-3600.0, "clock", ClockError, "3600 s ahead of the organiser's"),
        (0.0, "version", VersionMismatch, "another protocol version than"),
    ],
)
async def test_the_organisers_word_ends_what_no_retry_mends(
    offset_s: float, refusal: str, error: type[Exception], told: str
) -> None:
    world = World()
    world.answer = Answered(HERE, offset_s, refusal)  # type: ignore[arg-type]
    with pytest.raises(error, match=told):
        await world.entrance().ask_organiser(lambda: False)
    assert world.asked == [(INVITE.organiser, INVITE.nodes)]


async def test_who_has_the_organisers_key_is_refused() -> None:
    world = World()
    world.answer = Answered(HERE, 0.0, None)
    invite = INVITE.model_copy(update={"organiser": key(1).peer_id})
    with pytest.raises(IdentityError, match=HERE):
        await world.entrance(invite).ask_organiser(lambda: False)


def test_other_refusals_may_pass() -> None:
    judge_answer(Answered(HERE, 29.0, "full"))


async def test_who_is_in_asks_no_more() -> None:
    world = World()
    await world.entrance().ask_organiser(lambda: True)
    assert world.asked == []


def test_the_clock_is_compared_with_the_middle_of_the_peers() -> None:
    observer = Recorder()
    watch = ClockWatch(observer)
    watch.look([])
    watch.look([0.1, -50.0, 0.2])  # one liar, or one wrong clock that is not ours
    assert observer.events == []
    for _ in range(3):
        watch.look([5.0, 6.0, 0.1])
    assert [f["cause"] for _, f in observer.events] == [
        "this computer's clock is 5 s behind those of its peers"
    ]
    watch.look([0.0])
    watch.look([-4.0])
    assert len(observer.events) == 2
