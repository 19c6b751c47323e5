"""The pipe between a daemon and its side-car carries typed frames or nothing."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.sidecar import channel
from protocol.errors import SidecarError

START = channel.Start(
    swarm="ab" * 32,
    key=bytes(68),
    listen=("/ip4/127.0.0.1/tcp/0",),
    announce=(),
    bootstrap=(),
    maps_port=False,
    folder="/tmp/x",
    start_s=1.0,
    dial_s=1.0,
)
REQUESTS = [
    START,
    channel.Publish(record=b"\x00\xff"),
    channel.Confirm(record=b""),
    channel.Lookup(),
    channel.StoreManifest(text="name = 'x'", expires_at=1.5),
    channel.FetchManifest(),
    channel.Ping(),
]
REPLIES = [
    channel.Pong(addresses=("/ip4/127.0.0.1/tcp/1",), peers=(), num_neighbours=3),
    channel.Stored(ok=True),
    channel.Confirmed(num_asked=3, num_holding=2),
    channel.Records(records=(b"a", b"\xff")),
    channel.ManifestText(text=None),
    channel.Failure(cause="p2pd is gone"),
]


@given(st.integers(1, 50))
def test_frames_survive_any_cut(size: int) -> None:
    stream = b"".join(channel.encode(i, packet) for i, packet in enumerate(REQUESTS))
    decoder = channel.Decoder()
    found = [
        packet
        for start in range(0, len(stream), size)
        for packet in decoder.requests(stream[start : start + size])
    ]
    assert found == list(enumerate(REQUESTS))


def test_replies_survive() -> None:
    stream = b"".join(channel.encode(i, packet) for i, packet in enumerate(REPLIES))
    assert list(channel.Decoder().replies(stream)) == list(enumerate(REPLIES))


def test_a_key_is_not_printed() -> None:
    assert "key" not in repr(START)


@given(st.binary(min_size=1, max_size=60))
def test_nonsense_ends_the_channel(body: bytes) -> None:
    with pytest.raises(SidecarError):
        list(channel.Decoder().requests(len(body).to_bytes(4, "big") + body))


@pytest.mark.parametrize(
    "body",
    [[0, {"op": "ping", "more": 1}], [0, {"op": "unknown"}], [0, {"ok": True}], [0], {}],
)
def test_unknown_packets_are_refused(body: object) -> None:
    packed = msgpack.packb(body)
    with pytest.raises(SidecarError):
        list(channel.Decoder().requests(len(packed).to_bytes(4, "big") + packed))


def test_length_is_limited_before_anything_is_read() -> None:
    with pytest.raises(SidecarError, match="exceeds"):
        list(channel.Decoder().requests(b"\xff\xff\xff\xff"))
