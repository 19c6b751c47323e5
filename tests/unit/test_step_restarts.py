"""Members that were started again within a step, and what becomes of the step."""

from __future__ import annotations

import pytest
from membership_kit import ROSTER, SILENCE_S, empty, join, presence, running
from step_kit import PEERS, decision_of

from protocol.core.past_life import PastLife
from protocol.keys import PeerId
from protocol.messages import Decision, Share
from protocol.step.membership import Membership

D1, D2, A1, A2 = PEERS[:4]
ALONE = [(D1,), (A1,), (PEERS[4],)]


def come_back(rules: Membership, *peers: PeerId, now: float = 0.0) -> None:
    for peer in peers:
        stage = rules.current.stage_of(peer)
        join(rules, peer, stage, now, is_restarted=True)


def test_where_another_holder_went_on_the_restarted_one_is_left_out() -> None:
    rules = running()
    come_back(rules, A1)
    decision = rules.propose(0.0)
    assert decision.roster[1] == (A2,)
    assert (decision.order, decision.begun) == ((0, 2), 0)


def test_a_holder_that_is_alone_goes_on_under_the_next_term() -> None:
    rules = running(ALONE)
    come_back(rules, A1)
    decision = rules.propose(0.0)
    assert decision.roster == tuple(ALONE)
    assert (decision.order, decision.begun) == ((0, 2), 0)


def test_with_a_data_node_that_is_alone_the_step_begins_anew() -> None:
    rules = running(ALONE)
    come_back(rules, D1)
    decision = rules.propose(0.0)
    assert (decision.order, decision.begun) == ((0, 2), 2)
    rules.on_decided(decision)
    come_back(rules, A1)
    assert rules.propose(0.0).begun == 2  # it goes on with that work


def test_the_whole_quota_is_dealt_when_a_step_begins_anew() -> None:
    rules = running()
    rules.on_decided(
        decision_of([(D1,), *ROSTER[1:]], term=2, shares=(Share(data_node=D1, slots=(0,)),))
    )
    join(rules, D1, 0, is_restarted=True)
    decision = rules.propose(0.0)
    slots = sorted(slot for share in decision.shares for slot in share.slots)
    assert slots == list(range(rules.manifest.training.quota))


def test_nothing_is_decided_while_another_member_may_turn_out_to_be_new() -> None:
    rules = running()
    rules.on_presence(D2, presence(0, seen=(0, 0)), 0.0)  # there, and has not answered yet
    come_back(rules, D1)
    assert rules.propose(0.0) is None
    come_back(rules, D2)
    assert rules.propose(0.0).begun == 2


def test_an_authority_that_was_started_again_waits_a_while_for_the_others() -> None:
    rules = empty()
    rules.watching_since = 0.0
    rules.on_decided(decision_of(ROSTER))
    for peer in (D1, A1, A2, *ROSTER[2]):
        come_back(rules, peer)
    assert rules.propose(1.0) is None
    late = 2 * SILENCE_S
    come_back(rules, D1, A1, A2, *ROSTER[2], now=late)
    assert rules.propose(late).data_nodes == (D1,)  # D2 is gone


def test_what_was_said_of_an_older_term_is_not_heard() -> None:
    rules = running(ALONE)
    come_back(rules, A1)
    rules.on_decided(rules.propose(0.0))
    assert rules.propose(0.0) is None


# --- what the node itself knows ------------------------------------------------------------


def opened(term: int, begun: int = 0, step: int = 3, **more: object) -> Decision:
    return decision_of(ROSTER, step=step, term=term, begun=begun, **more)


@pytest.mark.parametrize(
    ("me", "decision", "is_barred"),
    [
        (A1, opened(7), True),  # the earlier life worked under it
        (A1, opened(8), False),
        (D1, opened(8), True),  # others still have what it committed before
        (D1, opened(8, begun=8), False),
        (
            D1,
            opened(8, shares=(Share(data_node=D2, slots=(0, 1)),)),
            False,
        ),
        (D1, opened(9, step=4), False),
        (A1, opened(7, is_final=True), False),
    ],
)
def test_a_past_life_bars_what_it_may_have_worked_under(
    me: PeerId, decision: Decision, is_barred: bool
) -> None:
    assert PastLife(me, (3, 7)).bars(decision) is is_barred
    assert not PastLife(me, None).bars(decision)
