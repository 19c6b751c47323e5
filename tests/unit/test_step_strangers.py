"""What strangers and liars can cost a swarm: a bounded part of its time, and few members."""

from __future__ import annotations

from membership_kit import (
    GRACE_S,
    LIMITS,
    ROSTER,
    SILENCE_S,
    join,
    prepare,
    presence,
    proposed,
    running,
    suspect,
)
from step_kit import PEERS

from protocol.keys import PeerId
from protocol.messages import Suspect
from protocol.step import membership as membership_module
from protocol.step.membership import Membership
from protocol.step.newcomers import MOST_PROVEN, REST, Newcomers

WIDE = [PEERS[0:2], PEERS[2:6], PEERS[6:7]]
STRANGERS = [PeerId(f"stranger{n:034}") for n in range(40)]


def alive(rules: Membership, now: float) -> None:
    """Everybody was just heard of, and knows and holds what was decided."""
    current = rules.current
    assert current is not None
    for peer in current.members:
        held = {"step": current.step, "seen": current.order}
        rules.on_presence(peer, presence(current.stage_of(peer) or 0, **held), now)


def accuse(rules: Membership, by: PeerId, peer: PeerId, now: float) -> None:
    current = rules.current
    assert current is not None
    rules.on_suspect(
        by, Suspect(step=current.step, term=current.term, peer=peer, reason="test"), now
    )


# --- strangers -----------------------------------------------------------------------------


def test_however_many_strangers_come_they_cost_a_small_part_of_the_time() -> None:
    """Each is let in, works with nobody, and is left out when its stage reports it."""
    rules, now, lost_s, stall_s = running(), 0.0, 0.0, 30.0
    for stranger in STRANGERS:
        join(rules, stranger, 1, now=now)
        alive(rules, now)
        decision = rules.propose(now) or rules.propose(now + LIMITS.presence_s)
        if decision is not None:
            rules.on_decided(decision)
            assert stranger in decision.members
            accuse(rules, PEERS[2], stranger, now + stall_s)
            accuse(rules, PEERS[3], stranger, now + stall_s)
            alive(rules, now + stall_s)
            rules.on_decided(proposed(rules, now + stall_s + GRACE_S))
            assert stranger not in rules.current.members
            lost_s += stall_s + GRACE_S
        now += 60.0
    assert 0 < lost_s <= now / (1 + REST) + stall_s + GRACE_S


def test_who_finished_a_step_is_let_in_while_newcomers_wait() -> None:
    rules = running(step=1)
    rules.newcomers.finished(PEERS[:6])
    rules.on_change(PEERS[2], False, 0.0)
    rules.on_decided(proposed(rules, GRACE_S))
    rules.newcomers.closed_until = 1000.0
    alive(rules, GRACE_S)
    for peer in (PEERS[2], STRANGERS[0]):
        join(rules, peer, 1, now=GRACE_S)
    decision = proposed(rules, GRACE_S)
    assert PEERS[2] in decision.members
    assert STRANGERS[0] not in decision.members


def test_a_stage_without_a_holder_takes_whoever_comes() -> None:
    rules = running([*ROSTER[:2], PEERS[4:5]], step=1)
    rules.newcomers.closed_until = 1000.0
    join(rules, STRANGERS[0], 2)
    assert rules.propose(0.0) is None
    rules.on_change(PEERS[4], False, 0.0)
    decision = rules.propose(GRACE_S)
    assert decision is not None
    assert STRANGERS[0] in decision.roster[2]


def test_the_founders_and_who_worked_start_no_rest() -> None:
    rules = running()
    rules.on_change(PEERS[2], False, 5.0)
    alive(rules, 10.0)
    rules.candidates[PEERS[2]].down_since = 5.0
    rules.on_decided(proposed(rules, 10.0))
    assert rules.newcomers.may_enter(STRANGERS[0], 10.0)


def test_only_the_latest_are_remembered() -> None:
    rules = Newcomers()
    for number in range(2 * MOST_PROVEN):
        rules.finished([PeerId(f"p{number}")])
    assert len(rules._proven) == MOST_PROVEN


def test_strangers_that_only_say_that_they_are_there_fill_no_memory(monkeypatch) -> None:
    monkeypatch.setattr(membership_module, "MOST_CANDIDATES", 10)
    rules = running()
    for stranger in STRANGERS:
        rules.on_presence(stranger, presence(-1), 0.0)
        assert rules.assign(stranger, 0.0) in (1, 2)
    assert len(rules.candidates) == 10


def test_a_member_that_never_prepares_is_left_out_and_barred() -> None:
    """It is there, sends its ledger and its part of the sum, and then nothing."""
    rules, stall_s = running(), LIMITS.step_stall_s
    prepare(rules, *(p for p in PEERS[:6] if p != PEERS[3]))
    assert rules.propose(0.0) is None
    alive(rules, stall_s - 1)
    assert rules.propose(stall_s - 1) is None
    alive(rules, stall_s)
    decision = proposed(rules, stall_s)
    assert decision.roster[1] == (PEERS[2],)
    rules.on_decided(decision)
    alive(rules, stall_s)
    join(rules, PEERS[3], 1, now=stall_s)
    assert rules.propose(stall_s) is None
    assert rules.candidates[PEERS[3]].barred_until == stall_s + SILENCE_S


# --- liars ---------------------------------------------------------------------------------


def test_a_liar_costs_the_swarm_one_member_and_then_itself() -> None:
    rules, liar, now = running(WIDE), PEERS[2], 0.0
    left: list[PeerId] = []
    for victim in (PEERS[5], PEERS[4], PEERS[3]):
        if liar in rules.current.members:
            accuse(rules, liar, victim, now)
            before = set(rules.current.members)
            rules.on_decided(proposed(rules, now + GRACE_S))
            left += before - set(rules.current.members)
        now += 60.0
        alive(rules, now)
    assert left == [PEERS[5], liar]


def test_a_member_that_fails_again_and_again_is_left_out_each_time() -> None:
    """In a stage of two there is nobody to confirm it."""
    rules, now = running(), 0.0
    for _ in range(3):
        accuse(rules, PEERS[2], PEERS[3], now)
        rules.on_decided(proposed(rules, now + GRACE_S))
        assert rules.current.roster[1] == (PEERS[2],)
        now += 600.0
        alive(rules, now)
        join(rules, PEERS[3], 1, now=now)
        rules.on_decided(proposed(rules, now))
        alive(rules, now)


def test_what_half_of_a_stage_says_is_believed_each_time() -> None:
    rules = running(WIDE)
    for victim in (PEERS[5], PEERS[4]):
        for accuser in PEERS[2:4]:
            accuse(rules, accuser, victim, 0.0)
        rules.on_decided(proposed(rules, GRACE_S))
        assert victim not in rules.current.members
        alive(rules, 0.0)


def test_who_accuses_itself_is_believed() -> None:
    rules = running(WIDE)
    for victim in (PEERS[5], PEERS[4]):
        accuse(rules, victim, victim, 0.0)
        rules.on_decided(proposed(rules, GRACE_S))
        assert victim not in rules.current.members
        alive(rules, 0.0)


def test_a_liar_that_its_stage_needs_stays_and_so_does_whom_it_names() -> None:
    rules = running(WIDE)
    liar = PEERS[6]
    for victim, is_left_out in ((PEERS[5], True), (PEERS[4], False)):
        assert suspect(rules, liar, victim, term=rules.current.term)
        rules.on_decided(proposed(rules, GRACE_S))
        assert (victim not in rules.current.members) == is_left_out
        alive(rules, 0.0)


def test_a_word_is_forgotten_after_an_hour() -> None:
    rules = running(WIDE)
    for number, victim in enumerate((PEERS[5], PEERS[4])):
        now = number * 3700.0
        alive(rules, now)
        accuse(rules, PEERS[2], victim, now)
        rules.on_decided(proposed(rules, now + GRACE_S))
        assert victim not in rules.current.members
