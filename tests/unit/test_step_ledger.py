"""The ledger: each microbatch of the closes exactly once, the same work for all members."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_kit import KEYS, PEERS, SWARM, decision_of, entry_of

from protocol.errors import ProtocolViolation
from protocol.messages import StepClose, WorkId
from protocol.step.decision import sign_close
from protocol.step.ledger import StepLedger, assignments, drawing_nodes, duplicates

A, B = KEYS[0], KEYS[1]  # data nodes; slots 0 and 2, 1 and 3
X, Y, Z = PEERS[2], PEERS[3], PEERS[4]  # X and Y hold stage 1, Z stage 2
DECISION = decision_of([PEERS[:2], [X, Y], [Z]], step=5)


def close_of(key=A, slots=(0, 2), path=(X, Z), attempt: int = 0, step: int = 5) -> StepClose:
    return sign_close(SWARM, step, [entry_of(slot, path, attempt) for slot in slots], key)


def work(slot: int, key=A, attempt: int = 0) -> WorkId:
    return WorkId(5, key.peer_id, slot, attempt)


@pytest.fixture
def ledger() -> StepLedger:
    return StepLedger(X, 1, 5)


def test_a_slot_counts_once_whatever_the_attempt(ledger: StepLedger) -> None:
    ledger.commit(work(0))
    assert not ledger.has_room_for(work(0, attempt=1))
    assert ledger.has_room_for(work(2))
    assert ledger.has_room_for(work(0, key=B))
    with pytest.raises(ProtocolViolation, match="twice"):
        ledger.commit(work(0, attempt=1))


def test_the_first_close_of_a_data_node_stands(ledger: StepLedger) -> None:
    assert ledger.on_close(close_of(), DECISION)
    assert not ledger.on_close(close_of(path=(Y, Z)), DECISION)
    assert ledger.expected(DECISION)[A.peer_id, 0].path == (X, Z)


def test_a_close_lists_just_the_share_of_its_data_node(ledger: StepLedger) -> None:
    """Whoever is no data node, lists foreign slots or leaves some out has not closed."""
    for close in (
        close_of(KEYS[9]), close_of(slots=(0, 1, 2)), close_of(slots=(0,)), close_of(slots=()),
        close_of(step=6),
    ):  # fmt: skip
        assert not ledger.on_close(close, DECISION)
    assert ledger.closes == {}
    assert ledger.missing_closes(DECISION) == {A.peer_id, B.peer_id}


def test_a_close_of_a_share_that_changed_is_replaced(ledger: StepLedger) -> None:
    """All others left, so all slots were dealt again to a data node that had closed before."""
    ledger.on_close(close_of(), DECISION)
    alone = decision_of([PEERS[:1], [X, Y], [Z]], step=5, term=3)
    assert ledger.missing_closes(alone) == {A.peer_id}
    assert ledger.expected(alone) == {}
    assert ledger.on_close(close_of(slots=range(4)), alone)
    assert len(ledger.expected(alone)) == 4


def test_closes_are_missed_from_data_nodes_that_drew() -> None:
    ledger = StepLedger(X, 1, 5)
    idle = decision_of([PEERS[:2], [X, Y], [Z]], step=5, quota=1)
    assert ledger.missing_closes(idle) == {A.peer_id}


def test_what_a_data_node_that_left_drew_is_void(ledger: StepLedger) -> None:
    ledger.on_close(close_of(), DECISION)
    ledger.on_close(close_of(B, (1, 3)), DECISION)
    ledger.commit(work(0))
    without_a = DECISION.model_copy(
        update={"roster": (PEERS[1:2], (X, Y), (Z,)), "shares": DECISION.shares[1:]}
    )
    assert set(ledger.expected(without_a)) == {(B.peer_id, 1), (B.peer_id, 3)}
    assert ledger.entries(ledger.expected(without_a)) == ()
    assert ledger.unexpected(ledger.expected(without_a), without_a) == []


def test_what_a_data_node_drew_before_it_left_stays_void_when_it_is_back(
    ledger: StepLedger,
) -> None:
    ledger.commit(work(0))
    ledger.on_close(close_of(B, (1, 3)), DECISION)
    back = DECISION.model_copy(update={"shares": DECISION.shares[1:]})
    assert ledger.unexpected(ledger.expected(back), back) == []
    assert drawing_nodes(back) == (B.peer_id,)


def test_lost_commits_are_found_in_the_close(ledger: StepLedger) -> None:
    entries = [entry_of(0, (X, Z)), entry_of(2, (Y, Z), attempt=1)]
    ledger.on_close(sign_close(SWARM, 5, entries, A), DECISION)
    expected = ledger.expected(DECISION)
    assert ledger.unsettled(expected) == [work(0)]
    ledger.commit(work(0))
    assert ledger.unsettled(expected) == []


def test_a_commit_that_no_close_lists_is_unexpected(ledger: StepLedger) -> None:
    ledger.commit(work(1))
    ledger.on_close(close_of(), DECISION)
    assert ledger.unexpected(ledger.expected(DECISION), DECISION) == [(A.peer_id, 1)]


def test_only_the_path_names_a_holder_and_a_data_node_itself() -> None:
    assert StepLedger(X, 1, 0).names_me(A.peer_id, (X, Z))
    assert not StepLedger(X, 2, 0).names_me(A.peer_id, (X, Z))
    assert not StepLedger(X, 3, 0).names_me(A.peer_id, (X, Z))
    assert StepLedger(A.peer_id, 0, 0).names_me(A.peer_id, (X, Z))
    assert not StepLedger(A.peer_id, 0, 0).names_me(B.peer_id, (X, Z))


# --- dealing what is missing ---------------------------------------------------------------

slot_ids = st.tuples(st.sampled_from(PEERS[:3]), st.integers(0, 9))
ledgers_of = st.dictionaries(st.sampled_from(PEERS), st.frozensets(slot_ids), min_size=1)


@given(expected=st.frozensets(slot_ids), ledgers=ledgers_of, data=st.data())
def test_the_missing_are_dealt_completely_evenly_and_the_same_on_all(
    expected, ledgers, data
) -> None:
    dealt = assignments(expected, ledgers)
    present = frozenset().union(*ledgers.values())
    assert set(dealt) == expected - present
    loads = Counter(dict.fromkeys(ledgers, 0) | Counter(dealt.values()))
    assert max(loads.values()) - min(loads.values()) <= 1
    shuffled = data.draw(st.permutations(list(ledgers)))
    again = assignments(sorted(expected, reverse=True), {m: sorted(ledgers[m]) for m in shuffled})
    assert again == dealt


@given(ledgers=ledgers_of)
def test_who_keeps_a_duplicate_is_the_same_on_all(ledgers) -> None:
    found = duplicates(ledgers)
    for slot in frozenset().union(*ledgers.values()):
        owners = sorted(m for m in ledgers if slot in ledgers[m])
        assert found.get(slot, owners[:1]) == owners
