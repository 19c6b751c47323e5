"""Records of nodes: what is signed opens, everything else is refused."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ProtocolViolation
from protocol.keys import NodeKey
from protocol.records import (
    MAX_COST_MS,
    MAX_FLOWS,
    MAX_LIFETIME_S,
    MAX_RECORD_BYTES,
    Claim,
    NodeRecord,
    SeenSequences,
    SignedRecord,
    open_record,
    sign,
)

SWARM = "ab" * 32
NOW = 1_800_000_000.0
KEY = NodeKey(bytes(32))


def make(key: NodeKey = KEY, **changes: object) -> NodeRecord:
    fields: dict[str, object] = {
        "swarm": SWARM,
        "peer_id": key.peer_id,
        "sidecar_id": key.derive("sidecar").peer_id,
        "stage": 2,
        "addresses": ("/ip4/192.0.2.1/tcp/4001",),
        "sequence": 7,
        "expires_at": NOW + 30,
        "protocol_version": 1,
    }
    return NodeRecord.model_validate(fields | changes)


def forge(record: NodeRecord, key: NodeKey, body: bytes | None = None) -> bytes:
    """Sign ``record`` as the attacker ``key`` would: with the right tag and the wrong key."""
    body = record.body() if body is None else body
    signature = key.sign(b"shoal/node-record/1\n" + body)
    return SignedRecord(body=body, signature=signature).to_bytes()


def test_signed_record_opens() -> None:
    record = make(is_draining=True)
    assert open_record(sign(record, KEY), swarm=SWARM, now=NOW) == record


def test_body_is_golden() -> None:
    """Changing what is signed makes every older node refuse the record."""
    assert make().body() == (
        b'{"addresses":["/ip4/192.0.2.1/tcp/4001"],"capacity":0,"claim":null,"cost_ms":null,'
        b'"expires_at":1800000030.0,"is_draining":false,'
        b'"peer_id":"12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN","protocol_version":1,'
        b'"sequence":7,"sidecar_id":"'
        + make().sidecar_id.encode()
        + b'","stage":2,"swarm":"'
        + SWARM.encode()
        + b'","used":0}'
    )


def test_a_claim_and_the_load_are_signed_with_the_rest() -> None:
    claim = Claim(stage=3, epoch=60_000_000, expires_at=NOW + 20, is_firm=True)
    record = make(capacity=7, used=3, cost_ms=81, claim=claim)
    assert open_record(sign(record, KEY), swarm=SWARM, now=NOW) == record
    assert (
        b'"claim":{"epoch":60000000,"expires_at":1800000020.0,"is_firm":true,"stage":3}'
        in record.body()
    )


def test_the_largest_record_that_the_fields_allow_is_within_the_limit() -> None:
    longest = "/dns/" + "a" * 195
    record = make(
        stage=4095, addresses=(longest,) * 16, sequence=2**53 - 1, capacity=MAX_FLOWS,
        used=MAX_FLOWS, cost_ms=MAX_COST_MS, is_draining=True, protocol_version=2**31 - 1,
        claim=Claim(stage=4095, epoch=2**53 - 1, expires_at=NOW + 0.123456, is_firm=True),
    )  # fmt: skip
    assert len(sign(record, KEY)) <= MAX_RECORD_BYTES


def test_only_the_named_node_can_sign() -> None:
    with pytest.raises(ValueError, match="the record names"):
        sign(make(), NodeKey(b"\1" * 32))


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (forge(make(), NodeKey(b"\1" * 32)), "bad signature"),
        (sign(make(swarm="cd" * 32), KEY), "another swarm"),
        (sign(make(expires_at=NOW), KEY), "expired"),
        (sign(make(expires_at=NOW + MAX_LIFETIME_S + 1), KEY), "ahead"),
        (forge(make(), KEY, make().body() + b" "), "not canonical"),
        (forge(make(), KEY, make().body().replace(b'"stage":2', b'"stage":2.0')), "canonical"),
        (forge(make(), KEY, make().body()[:-1] + b',"x":1}'), "malformed"),
        (b"\x00" * (MAX_RECORD_BYTES + 1), "the limit is"),
        (msgpack.packb(["text", b"s" * 64]), r"not \[body, signature\]"),
        (msgpack.packb([b"body", b"short"]), r"not \[body, signature\]"),
        (b"", r"not \[body, signature\]"),
        (b"\xc1", r"not \[body, signature\]"),
    ],
)
def test_others_are_refused(data: bytes, cause: str) -> None:
    with pytest.raises(ProtocolViolation, match=cause):
        open_record(data, swarm=SWARM, now=NOW)


@pytest.mark.parametrize(
    "changes",
    [
        {"stage": -2},
        {"sequence": -1},
        {"expires_at": float("inf")},
        {"addresses": ("not a multiaddr",)},
        {"addresses": ("/ip4/192.0.2.1/tcp/1",) * 17},
        {"swarm": "short"},
        {"peer_id": "0" * 52},
        {"capacity": MAX_FLOWS + 1},
        {"used": -1},
        {"cost_ms": MAX_COST_MS + 1},
        {"claim": {"stage": 0, "epoch": 1, "expires_at": NOW}},
        {"claim": {"stage": 4096, "epoch": 1, "expires_at": NOW}},
        {"claim": {"stage": 1, "epoch": -1, "expires_at": NOW}},
        {"claim": {"stage": 1, "epoch": 1, "expires_at": float("inf")}},
        {"claim": {"stage": 1, "epoch": 1, "expires_at": NOW, "more": 1}},
    ],
)
def test_fields_have_limits(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        make(**changes)


@given(st.binary(max_size=600))
def test_noise_never_raises_anything_else(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        open_record(data, swarm=SWARM, now=NOW)


@given(st.data())
def test_flipped_bits_are_refused(data: st.DataObject) -> None:
    valid = bytearray(sign(make(), KEY))
    position = data.draw(st.integers(0, len(valid) * 8 - 1))
    valid[position // 8] ^= 1 << position % 8
    with pytest.raises(ProtocolViolation):
        open_record(bytes(valid), swarm=SWARM, now=NOW)


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(NodeRecord.model_fields)), _JSON)
def test_any_field_may_be_rubbish(field: str, value: object) -> None:
    """A valid signature over a rubbish body ends in a ProtocolViolation or a valid record."""
    fields = make().model_dump(mode="json") | {field: value}
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    if len(body) > MAX_RECORD_BYTES:
        return
    try:
        record = open_record(forge(make(), KEY, body), swarm=SWARM, now=NOW)
    except ProtocolViolation:
        return
    assert record.body() == body


@given(st.integers(0, 2**53 - 1), st.lists(st.from_regex(r"\A/[a-z0-9/]{1,60}\Z"), max_size=16))
def test_round_trip(sequence: int, addresses: list[str]) -> None:
    record = make(sequence=sequence, addresses=tuple(addresses))
    assert open_record(sign(record, KEY), swarm=SWARM, now=NOW) == record


@given(st.lists(st.integers(0, 5), min_size=1))
def test_sequence_never_goes_back(sequences: list[int]) -> None:
    seen, highest = SeenSequences(), -1
    for sequence in sequences:
        assert seen.admit(make(sequence=sequence), NOW) == (sequence >= highest)
        highest = max(highest, sequence)


def test_twin_of_the_newest_is_refused() -> None:
    seen = SeenSequences()
    assert seen.admit(make(stage=1), NOW)
    assert not seen.admit(make(stage=3), NOW)
    assert seen.admit(make(stage=1), NOW)


def test_unknown_nodes_cannot_fill_the_memory() -> None:
    seen = SeenSequences(max_nodes=2)
    first, second, third = (make(NodeKey(bytes([i]) * 32)) for i in range(3))
    assert seen.admit(first, NOW)
    assert seen.admit(second, NOW)
    assert not seen.admit(third, NOW)
    assert seen.admit(first.model_copy(update={"sequence": 8}), NOW)
    assert seen.admit(third.model_copy(update={"expires_at": NOW + 90}), NOW + 31)
