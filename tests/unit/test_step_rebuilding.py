"""Who rebuilds a stage whose last holder is gone, and the decision that follows."""

from __future__ import annotations

from membership_kit import GRACE_S, LIMITS, OTHER, PEERS, join, presence, running
from step_kit import digest_of

from protocol.messages import Decision
from protocol.step.membership import Membership

WAIT_S = GRACE_S + LIMITS.rebuild_wait_s
# Two data nodes, five stages; stage 3 is the one that is lost.
ROSTER = [PEERS[0:2], PEERS[2:3], PEERS[3:5], PEERS[5:6], PEERS[6:7], PEERS[7:8]]
LOST, NEW = ROSTER[3][0], PEERS[9]
OPTIONS = {"num_stages": 5, "recovery": "checkfree"}


def deserted(roster=ROSTER, **options: object) -> Membership:
    """A swarm at step 4 whose stage 3 lost its holder at time 0."""
    rules = running(roster, step=4, **{**OPTIONS, **options})
    rules.on_change(LOST, is_up=False, now=0.0)
    return rules


def alive(rules: Membership, now: float) -> None:
    """All others are heard of."""
    for peer, known in rules.candidates.items():
        if peer != LOST:
            known.seen_at = now


def named(rules: Membership, now: float) -> list[tuple[int, str]]:
    """Who rebuilds what, when the authority has looked all the time."""
    for at in (GRACE_S, now):
        alive(rules, at)
        found = rules.rebuilders(at)
    return [(r.stage, r.peer) for r in found]


def rebuilt(rules: Membership, peer: str, stage: int = 3, digest: str = "new") -> None:
    join(rules, peer, stage, digest=digest_of(digest), is_rebuilt=True)


def test_the_last_holder_has_time_to_come_back() -> None:
    rules = deserted()
    assert named(rules, WAIT_S - 0.1) == []
    rules.on_change(LOST, is_up=True, now=WAIT_S - 0.1)
    assert named(rules, WAIT_S + 9) == []


def test_a_newcomer_to_the_stage_comes_first_then_any_newcomer() -> None:
    rules = deserted()
    join(rules, PEERS[8], 1, digest=None)
    assert named(rules, WAIT_S) == [(3, PEERS[8])]
    rules = deserted()
    join(rules, PEERS[8], 1, digest=None)
    join(rules, NEW, 3, digest=None)
    assert named(rules, WAIT_S) == [(3, NEW)]


def test_else_a_holder_of_a_stage_that_keeps_another_one() -> None:
    assert named(deserted(), WAIT_S) == [(3, min(ROSTER[2]))]


def test_nobody_goes_whose_owner_named_another_stage() -> None:
    rules = deserted()
    for peer in ROSTER[2]:
        join(rules, peer, 2, is_bound=True)
    assert named(rules, WAIT_S) == []
    join(rules, NEW, 3, digest=None, is_bound=True)
    assert named(rules, WAIT_S) == [(3, NEW)]


def test_no_stage_loses_its_last_holder_and_no_data_node_goes() -> None:
    roster = [*ROSTER[:2], ROSTER[2][:1], *ROSTER[3:]]
    assert named(deserted(roster), WAIT_S) == []


def test_a_manifest_without_recovery_rebuilds_nothing() -> None:
    assert named(deserted(recovery="none"), WAIT_S) == []


def test_two_neighbours_lost_are_not_rebuilt_from_nothing() -> None:
    rules = deserted()
    join(rules, NEW, 3, digest=None)
    rules.on_change(ROSTER[4][0], is_up=False, now=0.0)
    for at in (GRACE_S, WAIT_S):
        alive(rules, at)
        rules.candidates[ROSTER[4][0]].seen_at = 0.0
        assert rules.rebuilders(at) == ()


def test_who_does_not_come_in_time_is_replaced() -> None:
    rules = deserted()
    join(rules, NEW, 1, digest=None)
    assert named(rules, WAIT_S) == [(3, NEW)]
    alive(rules, WAIT_S + LIMITS.request_s)
    (other,) = rules.rebuilders(WAIT_S + LIMITS.request_s)
    assert other.peer == min(ROSTER[2])


def test_the_step_begins_anew_with_what_was_rebuilt() -> None:
    rules = deserted()
    mover = min(ROSTER[2])
    assert named(rules, WAIT_S) == [(3, mover)]
    assert rules.propose(WAIT_S) is None
    rebuilt(rules, mover)
    decision = rules.propose(WAIT_S)
    assert isinstance(decision, Decision)
    assert (decision.step, decision.term, decision.begun) == (4, 2, 2)
    assert decision.roster[2:4] == (tuple(ROSTER[2][1:]), (mover,))
    assert decision.digests[3] == digest_of("new")
    assert decision.digests[2] == rules.current.digests[2]
    slots = sorted(slot for share in decision.shares for slot in share.slots)
    assert slots == list(range(rules.manifest.training.quota))


def test_a_state_counts_only_from_whom_was_named_for_this_stage_and_step() -> None:
    rules = deserted()
    join(rules, NEW, 3, digest=None)
    named(rules, WAIT_S)
    rebuilt(rules, OTHER if OTHER != NEW else PEERS[8])
    assert rules.propose(WAIT_S) is None
    rebuilt(rules, NEW, stage=2)
    assert rules.propose(WAIT_S) is None
    join(rules, NEW, 3, digest=digest_of("an old fork"))
    assert rules.propose(WAIT_S) is None
    rules.on_presence(
        NEW, presence(3, step=3, seen=(4, 1), digest=digest_of("old"), is_rebuilt=True), WAIT_S
    )
    assert rules.propose(WAIT_S) is None


def test_what_was_made_under_an_older_decision_does_not_count() -> None:
    rules = deserted()
    join(rules, NEW, 3, digest=None)
    named(rules, WAIT_S)
    late = presence(3, step=4, seen=(4, 0), digest=digest_of("new"), is_rebuilt=True)
    rules.on_presence(NEW, late, WAIT_S)
    assert rules.propose(WAIT_S) is None


def test_at_the_very_start_the_seed_gives_the_state() -> None:
    rules = running(ROSTER, **OPTIONS)
    rules.on_change(LOST, is_up=False, now=0.0)
    assert named(rules, WAIT_S) == []


def test_whoever_had_the_state_comes_back_before_the_rebuilt_one_is_there() -> None:
    rules = deserted()
    join(rules, NEW, 3, digest=None)
    named(rules, WAIT_S)
    join(rules, LOST, 3, now=WAIT_S)
    rebuilt(rules, NEW)
    decision = rules.propose(WAIT_S)
    assert decision is None or decision.digests[3] == rules.current.digests[3]
