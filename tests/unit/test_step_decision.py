"""Decisions and closes: what a majority signed counts, everything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_kit import KEYS, PEERS, SWARM, decision_of, entry_of

from protocol.errors import ProtocolViolation
from protocol.messages import StepOpen, Vote
from protocol.step.decision import (
    check_close,
    check_step_open,
    decision_bytes,
    majority,
    share_slots,
    sign_close,
    vote,
)

ROSTER = [PEERS[:2], PEERS[2:4]]


def opened(authorities: int, votes: list[Vote], **changes: object) -> StepOpen:
    decision = decision_of(ROSTER, **changes)
    return StepOpen(step=decision.step, decision=decision, votes=tuple(votes))


@pytest.mark.parametrize(("num", "needed"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_majority_decides_and_less_does_not(num: int, needed: int) -> None:
    assert majority(PEERS[:num]) == needed
    votes = [vote(decision_of(ROSTER), key) for key in KEYS[:needed]]
    message = opened(num, votes)
    assert check_step_open(message, SWARM, PEERS[:num]) == message.decision
    with pytest.raises(ProtocolViolation, match="votes"):
        check_step_open(opened(num, votes[:-1]), SWARM, PEERS[:num])


def test_one_authority_cannot_vote_twice() -> None:
    mine = vote(decision_of(ROSTER), KEYS[0])
    with pytest.raises(ProtocolViolation, match="two of one authority"):
        check_step_open(opened(3, [mine, mine]), SWARM, PEERS[:3])
    with pytest.raises(ProtocolViolation, match="1 of 2 votes"):
        check_step_open(opened(3, [mine]), SWARM, PEERS[:3])


def test_no_signature_is_checked_twice_and_none_that_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 votes fit a message; each check takes a tenth of a millisecond of the event loop."""
    checked: list[str] = []
    monkeypatch.setattr(
        "protocol.step.decision.is_signed_by", lambda peer, *_: checked.append(peer) or True
    )
    mine, theirs = (vote(decision_of(ROSTER), key) for key in (KEYS[0], KEYS[9]))
    for votes in ([mine] * 64, [mine, *[theirs] * 63]):
        with pytest.raises(ProtocolViolation, match="carries votes"):
            check_step_open(opened(1, votes), SWARM, PEERS[:1])
    assert checked == []
    check_step_open(
        opened(3, [vote(decision_of(ROSTER), key) for key in KEYS[:3]]), SWARM, PEERS[:3]
    )
    assert checked == PEERS[:3]


def test_votes_of_strangers_and_forged_votes_do_not_count() -> None:
    decision = decision_of(ROSTER)
    stranger = vote(decision, KEYS[9])
    forged = Vote(authority=PEERS[1], signature=stranger.signature)
    with pytest.raises(ProtocolViolation, match="votes of strangers"):
        check_step_open(opened(1, [stranger]), SWARM, PEERS[:1])
    with pytest.raises(ProtocolViolation, match="1 of 2 votes"):
        check_step_open(opened(3, [vote(decision, KEYS[0]), forged]), SWARM, PEERS[:3])


@pytest.mark.parametrize(
    "changes",
    [{"term": 2}, {"step": 1}, {"ballot": 2}, {"is_final": True}, {"digests": ("0" * 64,) * 2}],
)
def test_a_vote_is_for_one_decision_only(changes: dict[str, object]) -> None:
    votes = [vote(decision_of(ROSTER), KEYS[0])]
    with pytest.raises(ProtocolViolation):
        check_step_open(opened(1, votes, **changes), SWARM, PEERS[:1])


def test_a_decision_of_another_swarm_is_refused() -> None:
    decision = decision_of(ROSTER, swarm="cd" * 32)
    message = StepOpen(step=0, decision=decision, votes=(vote(decision, KEYS[0]),))
    with pytest.raises(ProtocolViolation, match="another swarm"):
        check_step_open(message, SWARM, PEERS[:1])


def test_equal_decisions_have_equal_bytes() -> None:
    assert decision_bytes(decision_of(ROSTER)) == decision_bytes(decision_of(ROSTER))
    assert decision_bytes(decision_of(ROSTER)) != decision_bytes(decision_of(ROSTER, term=2))


# --- closes --------------------------------------------------------------------------------


def test_a_close_is_its_data_nodes_word() -> None:
    close = sign_close(SWARM, 3, [entry_of(2, PEERS[2:3]), entry_of(0, PEERS[3:4])], KEYS[0])
    check_close(close, SWARM)
    assert [entry.slot for entry in close.entries] == [0, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 4},
        {"data_node": PEERS[1]},
        {"entries": ()},
        {"entries": (entry_of(0, PEERS[3:4]),)},
        {"entries": (entry_of(0, PEERS[2:3], attempt=1),)},
        {"entries": (entry_of(0, PEERS[2:3], loss=0.5),)},
    ],
)
def test_a_changed_close_is_refused(changes: dict[str, object]) -> None:
    close = sign_close(SWARM, 3, [entry_of(0, PEERS[2:3])], KEYS[0])
    with pytest.raises(ProtocolViolation, match="did not sign"):
        check_close(close.model_copy(update=changes), SWARM)


def test_a_close_of_another_swarm_or_with_a_slot_twice_is_refused() -> None:
    twice = sign_close(SWARM, 0, [entry_of(1, PEERS[2:3]), entry_of(1, PEERS[3:4])], KEYS[0])
    with pytest.raises(ProtocolViolation, match="twice"):
        check_close(twice, SWARM)
    with pytest.raises(ProtocolViolation, match="did not sign"):
        check_close(sign_close(SWARM, 0, [], KEYS[0]), "cd" * 32)


@given(quota=st.integers(0, 40), num=st.integers(1, 7))
def test_shares_deal_each_slot_once_and_evenly(quota: int, num: int) -> None:
    shares = share_slots(quota, PEERS[:num])
    assert sorted(slot for share in shares for slot in share.slots) == list(range(quota))
    sizes = [len(share.slots) for share in shares]
    assert max(sizes) - min(sizes) <= 1
