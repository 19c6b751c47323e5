"""Whatever bytes come, from a peer, the DHT or the side-car: a typed error or a valid message."""

from __future__ import annotations

import json
import zlib
from typing import Any, get_args

import msgpack
import pytest
import torch
from fuzz_kit import PEERS, example, hostile, mutations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from node.sidecar import channel
from node.transport.control import CONTROL_CODES
from protocol.errors import ConfigError, ProtocolViolation, SidecarError
from protocol.invite import Invite
from protocol.keys import NodeKey
from protocol.messages import ALL_MESSAGES
from protocol.records import NodeRecord, SignedRecord, open_record, sign
from protocol.wire import MESSAGE_CODES, PREFIX_BYTES, Codec, Limits, Opened, kind_of

CODES: dict[int, type[BaseModel]] = {**MESSAGE_CODES, **CONTROL_CODES}
CODEC = Codec(Limits(max_tensor_bytes=1 << 20), CONTROL_CODES)
PACKETS: tuple[type[channel.Packet], ...] = (*get_args(channel.Request), *get_args(channel.Reply))
NOW = 1_800_000_000.0
KEY, OTHER = NodeKey(bytes([1]) * 32), NodeKey(bytes([2]) * 32)

INVITE = Invite(
    swarm_id="ab" * 32,
    organiser=PEERS[0],
    seeds=(f"/ip4/192.0.2.1/tcp/1/p2p/{PEERS[0]}",),
)

by_code = pytest.mark.parametrize("code", CODES, ids=lambda code: kind_of(CODES[code]))
by_packet = pytest.mark.parametrize("model", PACKETS, ids=lambda model: model.__name__)
few = settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


def decode(data: bytes) -> Opened:
    prefix = CODEC.open_prefix(data[:PREFIX_BYTES])
    header = data[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes]
    opened = CODEC.open_header(prefix, header)
    CODEC.open_payload(prefix, header, opened, bytearray(data[PREFIX_BYTES + len(header) :]))
    return opened


def tensors_of(model: type[BaseModel]) -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3)] * getattr(model, "max_tensors", 0)


def framed(code: int, header: Any, payload: bytes) -> bytes:
    """A frame as an attacker makes it: every length and the checksum are right."""
    packed = msgpack.packb(header)
    crc = zlib.crc32(payload, zlib.crc32(packed))
    return (
        b"SHOL\x01" + bytes([code]) + len(packed).to_bytes(4, "big")
        + len(payload).to_bytes(8, "big") + crc.to_bytes(4, "big") + bytes(16) + packed + payload
    )  # fmt: skip


def header_of(code: int) -> tuple[dict[str, Any], bytes]:
    frame = CODEC.encode(example(CODES[code]), tensors_of(CODES[code]))
    return msgpack.unpackb(frame.header), b"".join(frame.payload)


# --- frames --------------------------------------------------------------------------------


def test_every_message_and_every_frame_of_the_transport_is_tried() -> None:
    assert {*ALL_MESSAGES} <= {*CODES.values()}
    assert len(CODES) == len(MESSAGE_CODES) + len(CONTROL_CODES)


@by_code
def test_the_example_itself_is_believed(code: int) -> None:
    header, payload = header_of(code)
    assert decode(framed(code, header, payload)).message == example(CODES[code])


@by_code
def test_a_frame_cut_at_any_byte_is_refused(code: int) -> None:
    header, payload = header_of(code)
    data = framed(code, header, payload)
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            decode(data[:length])


@by_code
@few
@given(data=st.data())
def test_a_mutated_header_is_refused_or_means_something_else(code: int, data: Any) -> None:
    header, payload = header_of(code)
    mutated = data.draw(mutations(header))
    try:
        opened = decode(framed(code, mutated, payload))
    except ProtocolViolation:
        return
    assert isinstance(opened.message, CODES[code])
    again = CODEC.encode(opened.message, tensors_of(CODES[code]))
    assert len(again.header) < 10 * len(msgpack.packb(mutated))


@by_code
@few
@given(data=st.data())
def test_flipped_bytes_are_refused(code: int, data: Any) -> None:
    header, payload = header_of(code)
    frame = bytearray(framed(code, header, payload))
    # the sequence numbers in the prefix are the lane's to check
    at = data.draw(st.integers(0, len(frame) - 1).filter(lambda n: not 22 <= n < PREFIX_BYTES))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolViolation):
        decode(bytes(frame))


@by_code
@pytest.mark.parametrize("claim", [2**63, 2**64 - 1, 2**32, 1 << 30])
def test_a_claim_of_more_than_memory_is_refused_unread(code: int, claim: int) -> None:
    prefix = framed(code, {}, b"")[:PREFIX_BYTES]
    with pytest.raises(ProtocolViolation):
        CODEC.open_prefix(prefix[:10] + claim.to_bytes(8, "big") + prefix[18:])
    with pytest.raises(ProtocolViolation):
        CODEC.open_prefix(prefix[:6] + (2**32 - 1).to_bytes(4, "big") + prefix[10:])


@by_code
def test_a_frame_under_anothers_type_is_refused(code: int) -> None:
    header, payload = header_of(code)
    for other in CODES:
        if other != code:
            with pytest.raises(ProtocolViolation):
                decode(framed(other, header, payload))


@few
@given(hostile)
def test_a_header_that_is_anything_is_refused(header: Any) -> None:
    for code in CODES:
        with pytest.raises(ProtocolViolation):
            decode(framed(code, header, b""))


# --- records, invites ----------------------------------------------------------------------


def record() -> dict[str, Any]:
    made = example(NodeRecord).model_dump()
    return made | {"peer_id": KEY.peer_id, "swarm": "ab" * 32, "expires_at": NOW + 30.0}


def test_a_record_cut_at_any_byte_is_refused() -> None:
    data = sign(NodeRecord.model_validate(record()), KEY)
    assert open_record(data, swarm="ab" * 32, now=NOW)
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            open_record(data[:length], swarm="ab" * 32, now=NOW)


@settings(few, max_examples=100)
@given(mutations(record()), st.sampled_from([KEY, OTHER]))
def test_a_mutated_record_is_refused_or_still_its_owners(fields: Any, key: NodeKey) -> None:
    """Signed by its owner, who may lie about itself, or by another, who may not."""
    body = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=repr).encode()[:4000]
    signature = key.sign(b"shoal/node-record/1\n" + body)
    data = SignedRecord(body=body, signature=signature).to_bytes()
    try:
        opened = open_record(data, swarm="ab" * 32, now=NOW)
    except ProtocolViolation:
        return
    assert opened.peer_id == key.peer_id
    assert NOW < opened.expires_at <= NOW + 600


@settings(few, max_examples=60)
@given(hostile)
def test_a_record_that_is_anything_is_refused(value: Any) -> None:
    for packed in (msgpack.packb(value), msgpack.packb([value, b"s" * 64])):
        with pytest.raises(ProtocolViolation):
            open_record(packed, swarm="ab" * 32, now=NOW)


@settings(few, max_examples=60)
@given(st.text(max_size=80), st.integers(0, 200))
def test_an_invite_that_is_anything_is_refused(noise: str, cut: int) -> None:
    whole = INVITE.encode()
    for text in (noise, whole[: cut % len(whole)], whole[:20] + noise + whole[20:]):
        try:
            assert Invite.decode(text, NOW) == INVITE
        except ConfigError:
            continue


# --- the side-car's channel ----------------------------------------------------------------


def packed(call: Any, fields: Any) -> bytes:
    body = msgpack.packb([call, fields])
    return len(body).to_bytes(4, "big") + bytes(body)


def opened(data: bytes) -> list[tuple[int, Any]]:
    """What both ends make of the bytes."""
    found: list[tuple[int, Any]] = []
    for side in (channel.Decoder().requests, channel.Decoder().replies):
        try:
            found += side(data)
        except SidecarError:
            continue
    return found


@by_packet
def test_a_packet_cut_at_any_byte_is_never_believed(model: type[channel.Packet]) -> None:
    whole = channel.encode(3, example(model))
    assert opened(whole) == [(3, example(model))]
    for length in range(len(whole)):
        assert opened(whole[:length]) == []
    for length in range(len(whole) - 4):
        assert opened(length.to_bytes(4, "big") + whole[4 : 4 + length]) == []


@by_packet
@few
@given(data=st.data())
def test_a_mutated_packet_is_refused_or_valid(model: type[channel.Packet], data: Any) -> None:
    mutated = data.draw(mutations(example(model).model_dump()))
    for number, packet in opened(packed(data.draw(st.sampled_from([1, 2**63, -1])), mutated)):
        assert isinstance(number, int)
        assert isinstance(packet, PACKETS)


@few
@given(hostile, hostile)
def test_a_packet_that_is_anything_is_refused(call: Any, fields: Any) -> None:
    assert opened(packed(call, fields)) == []
