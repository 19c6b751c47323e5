"""The frame codec: nothing is lost, nothing malformed believed, nothing allocated on a claim."""

from __future__ import annotations

import struct
import typing
import zlib
from pathlib import Path

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from wire_samples import ROUTING_GOLDEN, ROUTING_SAMPLES, SESSION_GOLDEN, SESSION_SAMPLES

from protocol.errors import ProtocolViolation
from protocol.keys import NodeKey
from protocol.messages import (
    ALL_MESSAGES,
    Accept,
    Accepted,
    Applied,
    Assign,
    AverageReport,
    Backward,
    Boundary,
    Busy,
    Commit,
    Computed,
    Decision,
    Entry,
    Failed,
    FetchBoundary,
    FetchState,
    Forward,
    HopLost,
    Ledger,
    LedgerEntry,
    Message,
    Paused,
    Prepare,
    Prepared,
    Presence,
    Promise,
    Rebuilder,
    Redrive,
    ReducePart,
    ReduceResult,
    Release,
    Resume,
    Share,
    StateChunk,
    StepClose,
    StepOpen,
    Suspect,
    Vote,
)
from protocol.wire import MESSAGE_CODES, PREFIX_BYTES, Codec, Limits, Opened, kind_of

A, B = (NodeKey(bytes([n]) * 32).peer_id for n in (1, 2))
DIGEST = "ab" * 32
DECISION = Decision(
    swarm=DIGEST,
    step=3,
    term=1,
    ballot=2,
    roster=((A,), (B,)),
    shares=(Share(data_node=A, slots=(0, 1)),),
    digests=(DIGEST, DIGEST),
)
OPEN = StepOpen(step=3, decision=DECISION, votes=(Vote(authority=A, signature=b"s" * 64),))
FLOW: dict[str, typing.Any] = {"step": 3, "data_node": A, "slot": 4, "attempt": 1}
SAMPLES: tuple[Message, ...] = (
    Presence(step=3, stage=-1, capacity=4, digest=None),
    Assign(step=3, stage=1),
    OPEN,
    Prepare(step=3, ballot=5),
    Promise(step=3, ballot=5, is_granted=True, accepted=OPEN),
    Accept(step=3, decision=DECISION),
    Accepted(step=3, ballot=5, term=1, vote=None),
    Prepared(step=3, term=1, stage=1, digest=DIGEST),
    Applied(step=3, stage=1, digest=DIGEST),
    Suspect(step=3, term=1, peer=B, reason="silent"),
    Forward(**FLOW, stage=1, path=(B,)),
    Backward(**FLOW, stage=1, path=(B,)),
    Commit(**FLOW, path=(B,)),
    Release(**FLOW),
    Failed(**FLOW, stage=1, reason="full"),
    Busy(**FLOW, stage=1),
    StepClose(
        step=3,
        data_node=A,
        entries=(Entry(slot=4, attempt=1, path=(B,), loss=2.5),),
        signature=b"s" * 64,
    ),
    Ledger(step=3, term=1, stage=1, entries=(LedgerEntry(data_node=A, slot=4, attempt=1),)),
    FetchBoundary(**FLOW, direction="activation", stage=1),
    Boundary(**FLOW, direction="gradient", stage=1),
    Redrive(**FLOW, stage=1),
    ReducePart(step=3, term=1, stage=1, shard=0, num_microbatches=2),
    ReduceResult(step=3, term=1, stage=1, shard=0, num_microbatches=2),
    FetchState(step=3, stage=1, chunk=0),
    StateChunk(step=3, stage=1, chunk=0, num_chunks=1, digest=DIGEST),
    Paused(step=3, deserted=(1,), stateless=(0, 2), rebuilders=(Rebuilder(stage=1, peer=A),)),
    AverageReport(step=3, term=1, stage=1, attempt=0, nonce=b"n" * 16, addresses=("/ip4",)),
    Computed(**FLOW, stage=1, is_backward=True),
    HopLost(**FLOW, stage=1, peer=B, before=A),
    Resume(**FLOW, stage=1, peer=B, route=(None, B)),
    *ROUTING_SAMPLES,
    *SESSION_SAMPLES,
)
# crc32 of the bytes of each sample, without a tensor, with sequence 7 and ack 5
GOLDEN: dict[str, str] = {
    "presence": "07e1ef09",
    "assign": "a699238d",
    "step_open": "fffdf826",
    "prepare": "e8c3a7c8",
    "promise": "a4490960",
    "accept": "bc216b56",
    "accepted": "1d17352b",
    "prepared": "ac9ffc1a",
    "applied": "06d10a4d",
    "suspect": "1864e283",
    "forward": "4e49851d",
    "backward": "68e1a5e2",
    "commit": "0990208f",
    "release": "48cd4fb8",
    "failed": "a64fec14",
    "busy": "33cf13c9",
    "step_close": "931acc83",
    "ledger": "f7e078ab",
    "fetch_boundary": "f240c9ed",
    "boundary": "1683b486",
    "redrive": "216937c1",
    "reduce_part": "c7b7da5c",
    "reduce_result": "167cf960",
    "fetch_state": "87f5a3be",
    "state_chunk": "aa5242bd",
    "paused": "970805a8",
    "average_report": "b623a191",
    "computed": "a41cd779",
    "hop_lost": "b54cb6b3",
    "resume": "b7754740",
    **ROUTING_GOLDEN,
    **SESSION_GOLDEN,
}
LIMITS = Limits(max_tensor_bytes=1 << 20)
CODEC = Codec(LIMITS)


def joined(message: BaseModel, *tensors: torch.Tensor, sequence: int = 7) -> bytes:
    return b"".join(CODEC.encode(message, tensors).buffers(sequence, 5))


def decode(data: bytes) -> tuple[Opened, tuple[torch.Tensor, ...]]:
    prefix = CODEC.open_prefix(data[:PREFIX_BYTES])
    header = data[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes]
    opened = CODEC.open_header(prefix, header)
    payload = bytearray(data[PREFIX_BYTES + prefix.header_bytes :])
    return opened, CODEC.open_payload(prefix, header, opened, payload)


def sample_tensors(message: Message) -> tuple[torch.Tensor, ...]:
    return (torch.arange(6.0).reshape(2, 3),) if message.max_tensors else ()


by_kind = pytest.mark.parametrize("message", SAMPLES, ids=lambda m: m.kind)


def test_every_message_type_has_a_sample_and_a_code():
    assert tuple(type(message) for message in SAMPLES) == ALL_MESSAGES
    assert sorted(kind_of(model) for model in MESSAGE_CODES.values()) == sorted(
        message.kind for message in SAMPLES
    )


@by_kind
def test_round_trip(message: Message):
    tensors = sample_tensors(message)
    opened, got = decode(joined(message, *tensors))
    assert opened.message == message
    assert all(torch.equal(a, b) for a, b in zip(got, tensors, strict=True))


@by_kind
def test_bytes_on_the_wire_do_not_change(message: Message):
    assert f"{zlib.crc32(joined(message)):08x}" == GOLDEN[message.kind]


def test_one_frame_byte_by_byte():
    assert joined(Assign(step=3, stage=1)) == bytes.fromhex(
        "53484f4c"  # magic
        "01"  # version
        "02"  # assign
        "00000032"  # header bytes
        "0000000000000000"  # payload bytes
        "3d0ee47a"  # crc32
        "0000000000000007"  # sequence
        "0000000000000005"  # ack
        "83a46b696e64a661737369676ea66669656c647383a47374657003a565706f636800a5737461676501a774656e736f727390"
    )


@by_kind
def test_truncation_at_every_byte_is_refused(message: Message):
    data = joined(message, *sample_tensors(message))
    for length in range(len(data)):
        with pytest.raises(ProtocolViolation):
            decode(data[:length])


@by_kind
def test_a_changed_byte_never_passes_as_the_same_frame(message: Message):
    data = joined(message, *sample_tensors(message))
    for at in range(len(data) - 16, len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        with pytest.raises(ProtocolViolation):
            decode(bytes(broken))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (3, 0, 2)])
def test_tensors_of_every_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = (torch.rand(shape) * 100).to(dtype)
    _, (got,) = decode(joined(SAMPLES[10], tensor))
    assert got.dtype == dtype
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)


def test_encoding_and_decoding_share_the_tensor_memory():
    tensor = torch.zeros(8)
    frame = CODEC.encode(SAMPLES[10], [tensor])
    tensor[0] = 1.0
    assert bytes(frame.payload[0][:4]) == struct.pack("<f", 1.0)
    prefix = CODEC.open_prefix(CODEC.encode(SAMPLES[10], [tensor]).buffers()[0][:PREFIX_BYTES])
    payload = bytearray(frame.payload[0])
    header = frame.header
    (got,) = CODEC.open_payload(prefix, header, CODEC.open_header(prefix, header), payload)
    payload[4:8] = struct.pack("<f", 2.0)
    assert got[1] == 2.0


def test_a_tensor_that_needs_a_gradient_or_is_not_contiguous_travels():
    tensor = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    _, (got,) = decode(joined(SAMPLES[10], tensor))
    assert torch.equal(got, tensor.detach())


def prefix_with(**claims: int) -> bytes:
    values = {"version": 1, "code": 11, "header": 10, "payload": 0, "crc": 0} | claims
    return struct.pack(
        "!4sBBIQIQQ",
        b"SHOL",
        values["version"],
        values["code"],
        values["header"],
        values["payload"],
        values["crc"],
        0,
        0,
    )


@pytest.mark.parametrize(
    "claims",
    [
        {"payload": 2**63},
        {"payload": (1 << 20) + 1},
        {"header": 64 * 1024 + 1},
        {"header": 2**32 - 1},
        {"code": 3, "header": 4 * 1024 * 1024 + 1},
        {"code": 1, "payload": 1},
        {"code": 0},
        {"code": 255},
        {"version": 2},
    ],
)
def test_a_claim_beyond_its_limit_is_refused_at_the_prefix(claims: dict[str, int]):
    with pytest.raises(ProtocolViolation):
        CODEC.open_prefix(prefix_with(**claims))


@pytest.mark.parametrize("claims", [{"payload": 1 << 20}, {"code": 3, "header": 4 << 20}])
def test_a_claim_at_its_limit_is_accepted(claims: dict[str, int]):
    assert CODEC.open_prefix(prefix_with(**claims))


def forged(kind: str, code: int, fields: object, tensors: object, payload: bytes = b"") -> bytes:
    header = msgpack.packb({"kind": kind, "fields": fields, "tensors": tensors})
    crc = zlib.crc32(payload, zlib.crc32(header))
    return prefix_with(code=code, header=len(header), payload=len(payload), crc=crc) + (
        header + payload
    )


ASSIGN = {"step": 1, "stage": 1, "epoch": 0}
FORWARD = SAMPLES[10].model_dump(exclude={"kind"})


@pytest.mark.parametrize(
    "data",
    [
        forged("assign", 2, {**ASSIGN, "extra": 1}, []),
        forged("assign", 2, {**ASSIGN, "kind": "presence"}, []),
        forged("presence", 2, ASSIGN, []),
        forged("assign", 2, {**ASSIGN, "step": -1}, []),
        forged("assign", 2, {**ASSIGN, "step": 2**53}, []),
        forged("assign", 2, [1, 2], []),
        forged("assign", 2, ASSIGN, [{"dtype": "uint8", "shape": [0]}]),
        forged("forward", 11, FORWARD, [{"dtype": "complex64", "shape": [1]}], b"12345678"),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [-1]}]),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [2**47, 2**47]}]),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [0, 2**47, 2**47]}]),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [3]}], b"12"),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [1] * 9}], b"1"),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": [1]}] * 2, b"12"),
        forged("forward", 11, FORWARD, [{"dtype": "uint8", "shape": ["1"]}], b"1"),
    ],
)
def test_a_malformed_header_is_refused(data: bytes):
    with pytest.raises(ProtocolViolation):
        decode(data)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_garbage_headers_only_raise_protocol_violations(garbage: bytes):
    data = prefix_with(code=2, header=len(garbage), crc=zlib.crc32(garbage)) + garbage
    with pytest.raises(ProtocolViolation):
        decode(data)


@given(st.binary(min_size=PREFIX_BYTES, max_size=PREFIX_BYTES))
def test_garbage_prefixes_only_raise_protocol_violations(garbage: bytes):
    with pytest.raises(ProtocolViolation):
        CODEC.open_prefix(garbage)


counts = st.integers(0, 2**53 - 1)


@given(
    step=counts,
    epoch=counts,
    slot=counts,
    stage=st.integers(0, 4095),
    path=st.lists(st.sampled_from([A, B]), max_size=9),
    purpose=st.sampled_from(["train", "eval", "redrive"]),
    target=st.sampled_from([None, A, B]),
    values=st.lists(st.floats(width=32), max_size=64),
)
@settings(max_examples=100, deadline=None)
def test_any_forward_message_survives(step, epoch, slot, stage, path, purpose, target, values):
    message = Forward(
        step=step, epoch=epoch, data_node=A, slot=slot, attempt=0, stage=stage,
        path=tuple(path), purpose=purpose, target=target,
    )  # fmt: skip
    tensor = torch.tensor(values, dtype=torch.float32)
    opened, (got,) = decode(joined(message, tensor))
    assert opened.message == message
    assert torch.equal(got.view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize(
    "tensors",
    [[torch.zeros(2)] * 2, [torch.zeros(1 << 20)], [torch.zeros(1, dtype=torch.complex64)]],
)
def test_we_do_not_send_what_others_must_refuse(tensors: list[torch.Tensor]):
    with pytest.raises(ValueError):
        CODEC.encode(SAMPLES[10], tensors)


def test_the_documentation_lists_every_type_with_its_code():
    text = (Path(__file__).parents[2] / "docs" / "wire-protocol.md").read_text()
    for code, model in MESSAGE_CODES.items():
        assert f"| {code} | `{kind_of(model)}` | {getattr(model, 'lane', '')} |" in text
