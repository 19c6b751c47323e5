"""What one peer may send and one address may connect: bounded, whatever it does."""

from __future__ import annotations

import pytest
import trio

from node.transport import allowance as rules
from node.transport.allowance import Allowance, Allowances, Door
from node.transport.dialling import MOST_KNOWN, AddressBook
from protocol.errors import ProtocolViolation
from protocol.keys import PeerId
from protocol.wire import Prefix

PEER, OTHER = PeerId("peer"), PeerId("other")


def frame(header: int = 100, payload: int = 0) -> Prefix:
    return Prefix(2, header, payload, 0, 1, 0)


def num_taken(allowance: Allowance, prefix: Prefix, most: int = 100_000) -> int:
    for number in range(most):
        try:
            allowance.take(prefix)
        except ProtocolViolation:
            return number
    return most


async def test_a_flood_ends_at_the_burst_and_goes_on_at_the_rate(autojump_clock) -> None:
    mine = Allowance(is_member=False)
    assert 0 < num_taken(mine, frame()) <= rules.STRANGER_BURST
    assert num_taken(mine, frame()) == 0
    await trio.sleep(2)
    assert 0 < num_taken(mine, frame()) <= 2 * rules.STRANGER_RATE


async def test_what_is_long_to_read_costs_more(autojump_clock) -> None:
    small, large = (
        num_taken(Allowance(is_member=False), frame(header)) for header in (100, 1 << 20)
    )
    assert large * 500 < small


async def test_a_members_tensors_cost_nothing_and_a_strangers_do(autojump_clock) -> None:
    tensor = frame(payload=1 << 20)
    assert num_taken(Allowance(is_member=True), tensor) == 100_000
    most_bytes = rules.STRANGER_BURST * 64 * 1024
    assert num_taken(Allowance(is_member=False), tensor) << 20 <= most_bytes


async def test_whoever_this_node_talks_to_may_answer(autojump_clock) -> None:
    mine = Allowance(is_member=False)
    ack = frame(header=0)
    for _ in range(100_000):
        mine.earn()
        mine.take(ack)


async def test_a_new_session_brings_nothing_new(autojump_clock) -> None:
    allowances = Allowances()
    allowances.expect([OTHER])
    assert num_taken(allowances.of(PEER), frame()) > 0
    assert not allowances.of(PEER).begin_session()
    assert allowances.of(OTHER).begin_session()
    await trio.sleep(rules.SESSION_TOKENS / rules.STRANGER_RATE + 1)
    assert allowances.of(PEER).begin_session()


async def test_a_decision_changes_what_a_peer_may_send_and_not_what_it_sent(
    autojump_clock,
) -> None:
    allowances = Allowances()
    assert allowances.of(PEER).is_member  # nothing is known yet
    allowances.expect([OTHER])
    as_stranger = num_taken(allowances.of(PEER), frame())
    allowances.expect([PEER])
    as_member = num_taken(allowances.of(PEER), frame())
    assert as_stranger + as_member <= rules.MEMBER_BURST
    allowances.expect([OTHER])
    assert num_taken(allowances.of(PEER), frame()) == 0


async def test_invented_peers_and_addresses_fill_no_memory(
    autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_MOST_REMEMBERED", 10)
    monkeypatch.setattr(rules, "_MOST_ADDRESSES", 10)
    allowances, door = Allowances(), Door()
    for number in range(1000):
        allowances.of(PeerId(f"p{number}"))
        door.lets_in(f"10.0.{number // 256}.{number % 256}")
    assert (len(allowances._of), len(door._of)) == (10, 10)


async def test_an_ipv6_host_is_one_address_however_many_it_has(autojump_clock) -> None:
    door = Door()
    taken = sum(door.lets_in(f"2001:db8::{number:x}") for number in range(1000))
    assert taken == rules.CONNECTION_BURST
    assert door.lets_in("2001:db8:1::1")
    assert door.lets_in("192.0.2.1")
    assert sum(door.lets_in("::ffff:192.0.2.1") for _ in range(1000)) < rules.CONNECTION_BURST
    assert door.lets_in("no address")


async def test_addresses_of_invented_peers_are_forgotten_and_members_are_not(
    autojump_clock,
) -> None:
    book = AddressBook(1.0, None)  # type: ignore[arg-type]
    book.learn(PEER, ["/a"])
    book.pin([PEER])
    for number in range(2 * MOST_KNOWN):
        book.learn(PeerId(f"p{number}"), ["/b"])
    assert book.of(PEER) == ("/a",)
    assert len(book._addresses) == MOST_KNOWN + 1
    assert book.of(PeerId("p0")) == ()
