"""What a side-car stores for others and believes from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.sidecar.child import validator as validator_module
from node.sidecar.child.validator import RecordValidator
from protocol.keys import NodeKey
from protocol.records import MAX_LIFETIME_S, NodeRecord, SignedRecord, sign

SWARM = "ab" * 32
NOW = 1_800_000_000.0
KEY, OTHER = NodeKey(bytes(32)), NodeKey(b"\1" * 32)
NODES, MANIFEST = b"n" * 20, b"m" * 20


@dataclass(frozen=True)
class Stored:
    """The shape of hivemind's DHTRecord."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def make(**changes: object) -> NodeRecord:
    fields: dict[str, object] = {
        "swarm": SWARM,
        "peer_id": KEY.peer_id,
        "sidecar_id": KEY.derive("sidecar").peer_id,
        "stage": 2,
        "addresses": (),
        "sequence": 7,
        "expires_at": NOW + 30,
        "protocol_version": 1,
    }
    return NodeRecord.model_validate(fields | changes)


def stored(record: NodeRecord, data: bytes | None = None) -> Stored:
    value = sign(record, KEY) if data is None else data
    return Stored(NODES, msgpack.packb(record.peer_id), msgpack.packb(value), record.expires_at)


def validator(now: float = NOW) -> RecordValidator:
    return RecordValidator(SWARM, NODES, MANIFEST, lambda: now)


def test_own_record_is_believed_twice() -> None:
    one = validator()
    assert one.validate(stored(make()))
    assert one.validate(stored(make()))


FORGED = SignedRecord(body=make().body(), signature=OTHER.sign(make().body())).to_bytes()
GOOD = stored(make())


@pytest.mark.parametrize(
    "record",
    [
        stored(make(), FORGED),
        stored(make(swarm="cd" * 32)),
        stored(make(expires_at=NOW - 1)),
        stored(make(expires_at=NOW + MAX_LIFETIME_S + 1)),
        replace(GOOD, subkey=msgpack.packb(OTHER.peer_id)),
        replace(GOOD, subkey=msgpack.packb(None)),
        replace(GOOD, expiration_time=GOOD.expiration_time + 1),
        replace(GOOD, expiration_time=float("nan")),
        replace(GOOD, key=b"x" * 20),
        replace(GOOD, key=MANIFEST),
        replace(GOOD, value=msgpack.packb("text")),
        replace(GOOD, value=b""),
        Stored(MANIFEST, msgpack.packb(None), msgpack.packb("not a manifest"), NOW + 30),
    ],
)
def test_others_are_refused(record: Stored) -> None:
    assert not validator().validate(record)


def test_lower_sequence_never_comes_back() -> None:
    one = validator()
    assert one.validate(stored(make(sequence=8)))
    assert not one.validate(stored(make(sequence=7, expires_at=NOW + 40)))
    assert one.validate(stored(make(sequence=9, expires_at=NOW + 40)))


def test_a_record_opened_before_still_expires() -> None:
    time = NOW
    one = RecordValidator(SWARM, NODES, MANIFEST, lambda: time)
    assert one.validate(GOOD)
    time = NOW + 31
    assert not one.validate(GOOD)


@given(st.binary(max_size=40), st.binary(max_size=40), st.sampled_from([NODES, MANIFEST]))
def test_noise_is_refused(subkey: bytes, value: bytes, key: bytes) -> None:
    assert not validator().validate(Stored(key, subkey, value, NOW + 30))


def test_invented_nodes_do_not_crowd_out_those_that_were_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All records travel in one message: more than it holds would blind everybody."""
    time = NOW
    one = RecordValidator(SWARM, NODES, MANIFEST, lambda: time)
    assert one.validate(stored(make()))
    monkeypatch.setattr(validator_module, "MAX_BYTES", 20_000)
    taken = [one.validate(invented(number)) for number in range(2, 60)]
    assert taken[:5] == [True] * 5
    assert not any(taken[-5:])
    assert one._num_bytes <= 20_000
    for sequence in range(8, 20):
        assert one.validate(stored(make(sequence=sequence, expires_at=NOW + 30 + sequence)))
    time = NOW + 31  # and when they are gone there is room again
    assert one.validate(invented(200, expires_at=time + 30))
    assert one._num_bytes == sum(len(value) for value, _ in one._opened.values())


def invented(number: int, expires_at: float = NOW + 30) -> Stored:
    key = NodeKey(bytes([number]) * 32)
    record = make(peer_id=key.peer_id, expires_at=expires_at)
    packed = msgpack.packb(sign(record, key))
    return Stored(NODES, msgpack.packb(record.peer_id), packed, record.expires_at)
