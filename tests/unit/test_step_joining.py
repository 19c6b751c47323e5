"""Who is let into a step, and how long a step waits for a joiner."""

from __future__ import annotations

import pytest
from membership_kit import JOINER, LIMITS, OTHER, join, prepare, presence, proposed, running
from step_kit import PEERS, digest_of

# --- joining -------------------------------------------------------------------------------


def test_a_joiner_with_the_state_is_let_in_at_once() -> None:
    rules = running()
    join(rules, JOINER, 1)
    decision = proposed(rules)
    assert decision.order == (0, 2)
    assert decision.roster[1] == tuple(sorted([*PEERS[2:4], JOINER]))
    assert decision.shares == rules.current.shares


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": digest_of("other")},
        {"digest": None},
        {"step": 1},
        {"seen": (0, 0)},
        {"is_draining": True},
        {"stage": -1},
        {"stage": 7},
    ],
)
def test_a_joiner_without_the_state_or_the_decision_stays_out(changes: dict[str, object]) -> None:
    rules = running()
    rules.on_presence(JOINER, presence(1, **changes), 0.0)
    assert rules.propose(0.0) is None


def test_a_joiner_that_comes_when_some_are_prepared_waits_unless_it_asked_for_time() -> None:
    rules = running()
    prepare(rules, PEERS[0])
    join(rules, JOINER, 1)
    assert rules.propose(0.0) is None
    join(rules, JOINER, 1, wants_hold=True)
    assert JOINER in proposed(rules).roster[1]


def test_a_slow_joiner_holds_the_step_for_a_while_and_no_longer() -> None:
    rules = running()
    join(rules, JOINER, 1, wants_hold=True, digest=None)
    prepare(rules)
    assert rules.propose(0.0) is None
    for candidate in rules.candidates.values():
        candidate.seen_at = LIMITS.admission_hold_s
    assert rules.propose(LIMITS.admission_hold_s - 1) is None
    assert proposed(rules, LIMITS.admission_hold_s).step == 1


def test_many_slow_joiners_hold_a_step_no_longer_than_one() -> None:
    rules = running()
    prepare(rules)
    limit = LIMITS.admission_hold_s
    join(rules, JOINER, 1, wants_hold=True, digest=None)
    assert rules.propose(0.0) is None
    for candidate in rules.candidates.values():
        candidate.seen_at = limit
    join(rules, OTHER, 1, now=limit - 1, wants_hold=True, digest=None)
    assert rules.propose(limit - 1) is None
    assert proposed(rules, limit).step == 1


def test_strangers_that_never_come_in_hold_few_steps() -> None:
    rules, limit = running(), LIMITS.admission_hold_s
    for number, (peer, is_held) in enumerate([(JOINER, True), (OTHER, False)]):
        now = number * limit
        for candidate in rules.candidates.values():
            candidate.seen_at = now
        prepare(rules)
        join(rules, peer, 1, now=now, wants_hold=True, digest=None)
        assert (rules.propose(now) is None) == is_held
        rules.on_decided(proposed(rules, now + limit * is_held))


def test_who_comes_in_after_a_hold_leaves_room_for_the_next_one() -> None:
    rules = running()
    prepare(rules)
    join(rules, JOINER, 1, wants_hold=True, digest=None)
    assert rules.propose(0.0) is None
    join(rules, JOINER, 1, wants_hold=True)
    rules.on_decided(proposed(rules))
    prepare(rules)
    rules.on_decided(proposed(rules))
    prepare(rules)
    join(rules, OTHER, 1, wants_hold=True, digest=None)
    assert rules.propose(0.0) is None


def test_a_joiner_that_is_gone_holds_nothing() -> None:
    rules = running()
    join(rules, JOINER, 1, wants_hold=True, digest=None)
    prepare(rules)
    rules.on_change(JOINER, False, 0.0)
    assert proposed(rules, 1.0).step == 1


# --- stages for newcomers ------------------------------------------------------------------


def test_newcomers_go_where_the_fewest_are() -> None:
    rules = running([PEERS[0:1], PEERS[2:5], PEERS[5:6]])
    stages = []
    for peer in PEERS[8:11]:
        rules.on_presence(peer, presence(-1), 0.0)
        stages.append(rules.assign(peer, 0.0))
        assert rules.assign(peer, 0.0) == stages[-1]
    assert stages == [2, 2, 1]


def test_a_member_that_forgot_its_stage_gets_the_same_again() -> None:
    rules = running([PEERS[0:1], PEERS[2:5], PEERS[5:6]])
    rules.on_presence(PEERS[2], presence(-1), 0.0)
    assert rules.assign(PEERS[2], 0.0) == 1


def test_strangers_are_forgotten_and_members_are_not() -> None:
    rules = running()
    rules.on_presence(JOINER, presence(-1), 0.0)
    rules.forget_the_gone(LIMITS.record_lifetime_s + 1)
    assert set(rules.candidates) == set(rules.current.members)


def test_the_first_joiners_are_let_in_together() -> None:
    rules = running()
    join(rules, JOINER, 1)
    assert rules.propose(0.0) is None
    join(rules, OTHER, 2, now=LIMITS.presence_s / 2)
    assert {JOINER, OTHER} <= set(proposed(rules, LIMITS.presence_s).members)
