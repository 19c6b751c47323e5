"""A node is registered when another peer has read its record, and not for ever."""

from __future__ import annotations

import trio
from step_kit import PEERS

from node.registration import Registration
from node.transport.session import Heartbeat
from protocol.deadlines import Deadlines
from protocol.simulation.trace import Trace, TracingObserver

LIMITS = Deadlines()
START = 1_800_000_000.0


def registration() -> Registration:
    observer = TracingObserver("n", Trace())
    return Registration(LIMITS, observer, lambda: START + trio.current_time())


def seen(milliseconds: float) -> Heartbeat:
    return Heartbeat(step=0, record_seen=int(milliseconds))


async def test_a_peers_word_counts_as_long_as_the_record_lives(autojump_clock) -> None:
    subject = registration()
    subject.on_heartbeat(PEERS[1], seen(0))
    assert not subject.is_registered
    subject.on_heartbeat(PEERS[1], seen(START * 1000))
    assert subject.is_registered
    await trio.sleep(LIMITS.record_lifetime_s + 1)
    assert not subject.is_registered


async def test_a_clock_that_was_set_back_does_not_unregister_a_node(autojump_clock) -> None:
    """Its sequence goes on from the highest that others know, which is ahead of the clock."""
    subject = registration()
    subject.on_heartbeat(PEERS[1], seen((START + 3600) * 1000))
    assert subject.is_registered


async def test_the_sidecar_is_doubted_when_no_peer_can_read_the_record(
    nursery, autojump_clock
) -> None:
    subject, doubts = registration(), []
    has_peers = False
    nursery.start_soon(subject.watch, lambda: has_peers, doubts.append)
    await trio.sleep(LIMITS.record_lifetime_s * 3)
    assert doubts == []  # alone is not broken
    has_peers = True
    await trio.sleep(LIMITS.record_lifetime_s + 3)
    assert len(doubts) == 1
