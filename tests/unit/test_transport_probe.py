"""Greeting a node once: who is there, and what time it has."""

from __future__ import annotations

import time

import pytest
from test_transport_network import QUICK, SWARM, Recorder, key, network, running

from node.transport.greeting import Greeter
from node.transport.probe import Answered, Prober
from protocol.keys import NodeKey


def prober(number: int, swarm: str = SWARM, ahead_s: float = 0.0) -> Prober:
    return Prober(key(number), swarm, QUICK, Recorder(), lambda: time.time() + ahead_s)


async def ask(node: NodeKey, who: Prober, addresses: tuple[str, ...]) -> Answered | None:
    return await who.greet(node.peer_id, addresses)


async def test_a_node_answers_and_no_session_begins() -> None:
    seen = Recorder()
    asked = network(1, observer=seen)
    async with running(asked):
        found = await ask(key(1), prober(2), ("/ip4/127.0.0.1/tcp/1", *asked.addresses))
        assert found is not None
        assert found.address == asked.addresses[0]
        assert found.refusal is None
        assert abs(found.clock_offset_s) < 1
        assert asked.connected() == ()
    assert [name for name, _ in seen.events if name.startswith("peer_")] == ["peer_probed"]


async def test_the_same_key_is_found_where_it_runs() -> None:
    first = network(1)
    async with running(first):
        assert await ask(key(1), prober(1), first.addresses) is not None


async def test_another_key_at_the_address_proves_nothing() -> None:
    """A stranger may repeat our old record, but cannot answer for us."""
    stranger = network(3)
    async with running(stranger):
        address = stranger.addresses[0].replace(key(3).peer_id, key(1).peer_id)
        assert await ask(key(1), prober(1), (address,)) is None
        assert await ask(key(1), prober(1), ("/ip4/127.0.0.1/tcp/1",)) is None


@pytest.mark.parametrize("ahead_s", [-40.0, 40.0])
async def test_a_wrong_clock_is_measured(ahead_s: float) -> None:
    asked = network(1)
    async with running(asked):
        found = await ask(key(1), prober(2, ahead_s=ahead_s), asked.addresses)
    assert found is not None
    assert found.refusal == "clock"
    assert found.clock_offset_s == pytest.approx(-ahead_s, abs=2)


@pytest.mark.parametrize("refusal", ["swarm", "version"])
async def test_a_refusal_is_told(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = network(1)
    swarm = SWARM
    if refusal == "swarm":
        swarm = "cd" * 32
    else:  # both read the constant: the one asked takes every hello for another version's
        monkeypatch.setattr(Greeter, "judge", lambda *_: "version")
    async with running(asked):
        found = await ask(key(1), prober(2, swarm), asked.addresses)
    assert found is not None
    assert found.refusal == refusal
