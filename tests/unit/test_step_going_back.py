"""When a swarm goes back to an older step, and to which: the rule by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from membership_kit import (
    GRACE_S,
    JOINER,
    LIMITS,
    ROSTER,
    SILENCE_S,
    join,
    prepare,
    presence,
    running,
)
from step_kit import PEERS, decision_of, digest_of

from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.step.membership import Membership

NOW = 100.0
LATER = NOW + SILENCE_S  # until a stage counts as one without its state
STUCK = 1  # the stage that lost its state


def digests_at(step: int, branch: str = "") -> list[str]:
    return [digest_of(f"{stage} {step} {branch}") for stage in range(3)]


def at(step: int, term: int, branch: str = "") -> Decision:
    digests = tuple(digests_at(step, branch))
    return decision_of(ROSTER, step=step, term=term).model_copy(update={"digests": digests})


HISTORY = [at(step, step + 1) for step in range(8)]


def paused(
    kept: Sequence[Sequence[int]] = ((4, 2), (4,), (6, 4)),
    *,
    lost: bool = True,
    history: Sequence[Decision] = HISTORY,
) -> Membership:
    """At step 7 stage 1 is there without its state; ``kept`` names steps on the disks by stage."""
    rules = running()
    rules.back._history = lambda: reversed(history)
    current = history[-1]
    rules.on_decided(current)
    for stage, holders in enumerate(ROSTER):
        digest = current.digests[stage]
        for peer in holders:
            fields: dict[str, object] = {"step": current.step, "digest": digest}
            if stage == STUCK:
                fields = {"step": 4, "digest": None, "lacks": digest if lost else None}
            offered = [(step, digests_at(step)[stage]) for step in kept[stage]]
            say(rules, peer, stage, kept=offered, **fields)
    assert rules.propose(NOW) is None  # for a moment it may be reading its disk
    for known in rules.candidates.values():
        known.seen_at = LATER
    return rules


def say(rules: Membership, peer: PeerId, stage: int, now: float = NOW, **fields: object) -> None:
    seen = rules.current.order if rules.current else (0, 0)
    rules.on_presence(peer, presence(stage, seen=seen, **fields), now)


def test_the_newest_step_that_every_stage_has_begins_again_under_a_new_term() -> None:
    decision = paused().propose(LATER)
    assert decision is not None
    assert decision.order == (4, 9)
    assert decision.begun == 9  # nothing of the first time counts
    assert list(decision.digests) == digests_at(4)
    assert list(decision.roster) == [tuple(sorted(holders)) for holders in ROSTER]
    assert decision.follows(HISTORY[-1])


def test_it_begins_with_those_who_have_the_states() -> None:
    rules = paused(kept=((4,), (4,), ()))
    assert rules.propose(LATER) is None
    say(rules, PEERS[4], 2, LATER, step=7, kept=[(4, digests_at(4)[2])])
    say(rules, JOINER, 1, LATER, step=4, kept=[(4, digests_at(4)[1])])
    decision = rules.propose(LATER)
    assert decision is not None
    assert decision.roster[2] == (PEERS[4],)
    assert JOINER in decision.roster[1]


@pytest.mark.parametrize(
    "kept",
    [((4,), (2,), (4, 2)), ((0,), (0,), (0,)), ((), (), ()), ((7,), (7,), (7,)), ((4,), (4,), ())],
    ids=["none in common", "the beginning", "nothing", "not older", "not all"],
)
def test_without_a_common_step_it_waits(kept: Sequence[Sequence[int]]) -> None:
    assert paused(kept).propose(LATER) is None


def test_states_that_the_swarm_never_decided_on_are_no_offer() -> None:
    rules = paused(kept=((4,), (), (4,)))
    for peer in ROSTER[STUCK]:
        kept = [(4, digest_of("made up"))]
        say(rules, peer, STUCK, LATER, step=4, lacks=HISTORY[-1].digests[STUCK], kept=kept)
    assert rules.propose(LATER) is None


def test_states_of_two_histories_are_not_mixed() -> None:
    """The swarm went back once, from step 4 to step 3, and computed step 4 again."""
    history = [*HISTORY[:5], at(3, 6), at(4, 7, "again"), at(5, 8), at(6, 9), at(7, 10)]
    rules = paused(kept=((4,), (), (4,)), history=history)
    for peer in ROSTER[STUCK]:
        kept = [(4, digests_at(4, "again")[STUCK])]
        say(rules, peer, STUCK, LATER, step=4, lacks=history[-1].digests[STUCK], kept=kept)
    assert rules.propose(LATER) is None


@pytest.mark.parametrize("doubt", ["has not looked", "is away"])
def test_while_a_member_may_have_the_state_it_waits_for_long(doubt: str) -> None:
    rules = paused()
    peer = ROSTER[STUCK][0]
    if doubt == "has not looked":
        say(rules, peer, STUCK, LATER, step=4, digest=None)
    else:
        rules.on_change(peer, False, LATER)
    later = LATER + GRACE_S
    assert rules.propose(later) is None
    overdue = later + LIMITS.state_wait_s
    for other, known in rules.candidates.items():
        if not (other == peer and doubt == "is away"):
            known.seen_at = overdue
    decision = rules.propose(overdue)
    assert decision is not None
    assert decision.step == 4


def test_a_member_that_finds_the_state_ends_it() -> None:
    rules = paused()
    say(rules, ROSTER[STUCK][0], STUCK, LATER, step=7, digest=HISTORY[-1].digests[STUCK])
    decision = rules.propose(LATER)
    assert decision is None or decision.step == 7


def test_a_newcomer_that_has_the_state_comes_before_going_back() -> None:
    rules = paused()
    current = HISTORY[-1]
    say(rules, JOINER, STUCK, LATER, step=7, digest=current.digests[STUCK])
    decision = rules.propose(LATER)
    assert decision is not None
    assert decision.order == (7, 9)
    assert JOINER in decision.roster[STUCK]


def test_it_is_let_in_though_other_stages_are_prepared_already() -> None:
    """The holders died when all their work was done."""
    rules = running()
    prepare(rules, *ROSTER[0], *ROSTER[2])
    for peer in ROSTER[STUCK]:
        rules.on_change(peer, False, 0.0)
    join(rules, JOINER, STUCK, GRACE_S)
    decision = rules.propose(GRACE_S)
    assert decision is not None
    assert JOINER in decision.roster[STUCK]


def test_an_empty_offer_does_not_count_twice() -> None:
    rules = paused(kept=((4, 2), (4, 2), (4, 2)))
    decision = rules.propose(LATER)
    assert decision is not None
    rules.on_decided(decision)
    assert rules.propose(LATER) is None
    for stage, holders in enumerate(ROSTER):
        for peer in holders:
            kept = [(step, digests_at(step)[stage]) for step in (4, 2)]
            lacks = decision.digests[stage] if stage == STUCK else None
            digest = None if stage == STUCK else decision.digests[stage]
            say(rules, peer, stage, LATER, step=4, digest=digest, kept=kept, lacks=lacks)
    assert rules.propose(LATER) is None
    again = rules.propose(LATER + SILENCE_S)
    assert again is not None
    assert again.step == 2
