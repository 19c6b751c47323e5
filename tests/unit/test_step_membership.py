"""Who belongs to the next step, as the leading authority proposes it."""

from __future__ import annotations

import pytest
from membership_kit import (
    GRACE_S,
    JOINER,
    OTHER,
    ROSTER,
    SILENCE_S,
    empty,
    join,
    prepare,
    presence,
    proposed,
    running,
    suspect,
)
from step_kit import PEERS, digest_of

from protocol.messages import Prepared

# --- the first opening ---------------------------------------------------------------------


def test_the_first_step_waits_for_the_least_number_of_holders() -> None:
    rules = empty(num_stages=1, min_holders=2, min_data_nodes=1)
    rules.on_presence(PEERS[0], presence(0), 0.0)
    rules.on_presence(PEERS[2], presence(1), 0.0)
    assert rules.propose(0.0) is None
    rules.on_presence(PEERS[3], presence(1), 0.0)
    decision = proposed(rules)
    assert decision.order == (0, 1)
    assert decision.roster == ((PEERS[0],), (PEERS[2], PEERS[3]))
    assert decision.digests == (digest_of("0"), digest_of("1"))
    assert decision.shares[0].slots == (0, 1, 2, 3)


def test_the_first_step_takes_only_those_whose_state_most_agree_on() -> None:
    rules = empty(num_stages=1)
    rules.on_presence(PEERS[0], presence(0), 0.0)
    for peer in PEERS[2:4]:
        rules.on_presence(peer, presence(1), 0.0)
    rules.on_presence(PEERS[4], presence(1, digest=digest_of("odd")), 0.0)
    rules.on_presence(PEERS[5], presence(1, step=3), 0.0)
    rules.on_presence(PEERS[6], presence(1, digest=None), 0.0)
    assert proposed(rules).roster[1] == tuple(PEERS[2:4])


def test_the_first_step_forgets_who_fell_silent() -> None:
    rules = empty(num_stages=1)
    rules.on_presence(PEERS[2], presence(1), 0.0)
    rules.on_presence(PEERS[0], presence(0), SILENCE_S * 2 + 1)
    assert rules.propose(SILENCE_S * 2 + 1) is None


# --- the next step -------------------------------------------------------------------------


def test_the_next_step_opens_when_all_are_prepared() -> None:
    rules = running()
    prepare(rules, *PEERS[:5])
    assert rules.propose(0.0) is None
    prepare(rules, PEERS[5])
    decision = proposed(rules)
    assert decision.order == (1, 2)
    assert decision.roster == tuple(map(tuple, ROSTER))
    assert decision.digests == tuple(digest_of(f"next{k}") for k in range(3))


def test_prepared_counts_from_members_for_this_term_and_their_own_stage() -> None:
    rules = running()
    message = Prepared(step=0, term=1, stage=1, digest=digest_of("x"))
    rules.on_prepared(PEERS[2], message.model_copy(update={"term": 2}))
    rules.on_prepared(PEERS[2], message.model_copy(update={"stage": 2}))
    rules.on_prepared(JOINER, message)
    assert rules.prepared == {}


def test_a_stranger_that_says_prepared_keeps_no_joiner_out() -> None:
    rules = running()
    rules.on_prepared(OTHER, Prepared(step=0, term=1, stage=1, digest=digest_of("x")))
    join(rules, JOINER, 1)
    assert JOINER in proposed(rules).roster[1]


def test_the_last_step_is_final_and_nothing_follows() -> None:
    rules = running(step=2, steps=3)
    prepare(rules)
    final = proposed(rules)
    assert final.is_final
    assert final.shares == ()
    rules.on_decided(final)
    for stage, holders in enumerate(ROSTER):
        for peer in holders:
            held = {"step": 3, "digest": final.digests[stage], "seen": final.order}
            rules.on_presence(peer, presence(stage, **held), 0.0)
    prepare(rules)
    assert rules.propose(0.0) is None


def test_a_draining_member_is_left_out_of_the_next_step_unless_it_is_the_last() -> None:
    rules = running([PEERS[0:2], PEERS[2:4], PEERS[4:5]])
    for peer, stage in ((PEERS[2], 1), (PEERS[4], 2)):
        rules.on_presence(peer, presence(stage, is_draining=True), 0.0)
    assert rules.propose(0.0) is None  # it finishes its step
    prepare(rules)
    assert proposed(rules).roster[1:] == ((PEERS[3],), (PEERS[4],))


# --- leaving -------------------------------------------------------------------------------


def test_a_member_whose_session_broke_is_left_out_after_the_grace() -> None:
    rules = running()
    rules.on_change(PEERS[2], False, 1.0)
    assert rules.propose(1.0 + GRACE_S / 2) is None
    decision = proposed(rules, 1.0 + GRACE_S)
    assert decision.order == (0, 2)
    assert decision.roster == (tuple(PEERS[0:2]), (PEERS[3],), tuple(PEERS[4:6]))
    assert decision.digests == rules.current.digests


def test_a_session_that_comes_back_in_time_changes_nothing() -> None:
    rules = running()
    rules.on_change(PEERS[2], False, 1.0)
    rules.on_change(PEERS[2], True, 1.2)
    assert rules.propose(2.0) is None


def test_a_frozen_member_is_left_out_for_its_silence() -> None:
    rules = running()
    for peer in PEERS[:5]:
        rules.candidates[peer].seen_at = SILENCE_S
    assert proposed(rules, SILENCE_S * 2).roster[2] == (PEERS[4],)


def test_a_stage_is_never_emptied() -> None:
    rules = running()
    for peer in PEERS[2:4]:
        rules.on_change(peer, False, 0.0)
    assert rules.propose(1.0) is None
    assert rules.deserted_stages(1.0) == (1,)
    rules.on_change(PEERS[3], True, 2.0)
    assert rules.deserted_stages(2.0) == ()
    assert rules.propose(2.0) is None  # it may have been started again, without its state
    rules.on_presence(PEERS[3], presence(1), 2.0)
    assert proposed(rules, 2.0).roster[1] == (PEERS[3],)


def test_an_authority_that_just_started_gives_members_time_to_call() -> None:
    """It restarts, and one member's presence comes before the others'."""
    rules = running()
    rules.candidates = {p: c for p, c in rules.candidates.items() if p in PEERS[::2]}
    rules.watching_since = 0.0
    assert rules.propose(1.0) is None
    for peer in PEERS[:6:2]:
        rules.candidates[peer].seen_at = SILENCE_S * 2
    decision = proposed(rules, SILENCE_S * 2)
    assert decision.roster == ((PEERS[0],), (PEERS[2],), (PEERS[4],))


def test_the_slots_of_a_data_node_that_left_are_void_and_of_the_last_one_dealt_again() -> None:
    rules = running()
    rules.on_change(PEERS[0], False, 0.0)
    decision = proposed(rules, 1.0)
    assert [(s.data_node, s.slots) for s in decision.shares] == [(PEERS[1], (1, 3))]
    rules.on_decided(decision)
    join(rules, PEERS[0], 0, now=1.0)
    back = proposed(rules, 1.0)
    assert back.roster[0] == tuple(PEERS[0:2])
    assert back.shares == decision.shares  # it draws again in the next step
    rules.on_decided(back)
    rules.on_change(PEERS[1], False, 1.0)
    assert [(s.data_node, s.slots) for s in proposed(rules, 2.0).shares] == [
        (PEERS[0], (0, 1, 2, 3))
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": digest_of("other")},
        {"digest": None},
        {"step": 1},
        {"stage": 2, "digest": digest_of("2")},
    ],
)
def test_a_member_that_does_not_hold_the_state_of_its_stage_is_left_out(
    changes: dict[str, object],
) -> None:
    rules = running()
    rules.on_presence(PEERS[2], presence(1, **changes), 0.0)
    assert proposed(rules).roster[1] == (PEERS[3],)


def test_a_member_that_does_not_know_the_decision_yet_is_waited_for() -> None:
    rules = running(step=1, term=4)
    rules.on_presence(PEERS[2], presence(1, step=0, seen=(0, 3)), 0.0)
    assert rules.propose(0.0) is None


def test_who_prepared_another_digest_than_its_stage_is_left_out() -> None:
    rules = running([PEERS[0:2], PEERS[2:5], PEERS[5:6]])
    prepare(rules)
    prepare(rules, PEERS[4], digest="odd")
    decision = proposed(rules)
    assert decision.order == (0, 2)
    assert decision.roster[1] == tuple(PEERS[2:4])


# --- suspicion -----------------------------------------------------------------------------


def test_the_most_suspected_member_leaves_after_a_while_and_is_barred() -> None:
    rules = running([PEERS[0:2], PEERS[2:5], PEERS[5:7]])
    assert suspect(rules, PEERS[2], PEERS[4])
    assert not suspect(rules, PEERS[2], PEERS[4])  # it is said again and again
    assert suspect(rules, PEERS[3], PEERS[4])
    suspect(rules, PEERS[4], PEERS[2])
    assert rules.propose(GRACE_S / 2) is None
    decision = proposed(rules, GRACE_S)
    assert decision.roster[1] == tuple(PEERS[2:4])
    rules.on_decided(decision)
    join(rules, PEERS[4], 1, now=GRACE_S)
    for peer in decision.members:
        rules.candidates[peer].presence = presence(
            decision.stage_of(peer) or 0, seen=decision.order
        )
    assert rules.propose(GRACE_S) is None
    assert PEERS[4] in proposed(rules, GRACE_S + SILENCE_S).roster[1]


def test_suspicion_of_the_last_holder_opens_a_new_term_with_all() -> None:
    rules = running([PEERS[0:2], PEERS[2:3], PEERS[4:6]])
    suspect(rules, PEERS[0], PEERS[2])
    decision = proposed(rules, GRACE_S)
    assert decision.order == (0, 2)
    assert decision.roster == rules.current.roster


def test_suspicion_counts_between_members_in_this_term_only() -> None:
    rules = running()
    assert not suspect(rules, JOINER, PEERS[2])
    assert not suspect(rules, PEERS[3], JOINER)
    assert not suspect(rules, PEERS[3], PEERS[2], term=2)
    assert rules.propose(10.0) is None
