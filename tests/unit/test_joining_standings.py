"""What a node makes of the records that it reads, when it knows a decision and when it does not."""

from __future__ import annotations

from joining_kit import LEASE_S, WALL_S
from step_kit import PEERS, SWARM, decision_of

from protocol.joining import Standing, standings
from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.records import Claim, NodeRecord

DATA, FIRST, SECOND, OTHER = PEERS[:4]
DECISION = decision_of([[DATA], [FIRST], [SECOND]])


def record_of(peer: PeerId, stage: int, **more: object) -> NodeRecord:
    values = {
        "swarm": SWARM, "peer_id": peer, "sidecar_id": peer, "stage": stage, "addresses": (),
        "sequence": 1, "expires_at": WALL_S + LEASE_S, "protocol_version": 1, "capacity": 3,
    }  # fmt: skip
    return NodeRecord.model_validate(values | more)


def stages_of(*records: NodeRecord, decision: Decision | None = DECISION) -> dict[PeerId, int]:
    found = standings(records, decision, WALL_S, usual=7)
    return {node.peer: node.stage for node in found}


def test_the_decision_knows_better_who_serves_what() -> None:
    moved = record_of(FIRST, 2)
    assert stages_of(moved) == {DATA: 0, FIRST: 1, SECOND: 2}


def test_a_member_without_a_record_counts_with_the_usual_flows() -> None:
    found = standings([record_of(FIRST, 1)], DECISION, WALL_S, usual=7)
    assert Standing(SECOND, 2, 7) in found
    assert Standing(FIRST, 1, 3) in found


def test_who_died_counts_no_more_though_its_record_still_lasts() -> None:
    """Left out by the decision; whoever is on its way claims its stage."""
    assert OTHER not in stages_of(record_of(OTHER, 1))
    claim = Claim(stage=1, epoch=0, expires_at=WALL_S + 1)
    assert stages_of(record_of(OTHER, 1, claim=claim))[OTHER] == 1
    assert stages_of(record_of(OTHER, -1, claim=claim))[OTHER] == -1
    assert stages_of(record_of(OTHER, 0))[OTHER] == 0  # more demand does no harm
    old = Claim(stage=1, epoch=0, expires_at=WALL_S)
    assert OTHER not in stages_of(record_of(OTHER, 1, claim=old))


def test_before_the_first_decision_all_records_count() -> None:
    assert stages_of(record_of(OTHER, 1), decision=None) == {OTHER: 1}


def test_who_drains_or_is_past_its_time_does_not_count() -> None:
    draining = record_of(FIRST, 1, is_draining=True)
    assert stages_of(draining) == {DATA: 0, SECOND: 2}
    assert OTHER not in stages_of(record_of(OTHER, -1, expires_at=WALL_S))
