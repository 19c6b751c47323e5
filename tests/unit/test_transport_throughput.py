"""How fast large frames cross a link, as both of its ends learn it."""

from __future__ import annotations

import pytest
import torch
import trio
from test_transport_network import forward, network, next_message, post, running

from node.transport.throughput import LEAST_BYTES, Throughput


def test_a_transfer_is_timed_without_the_round_trip() -> None:
    throughput = Throughput()
    assert throughput.bytes_per_s is None
    throughput.acknowledged(1_000_000, began_at=10.0, now=11.2, rtt_s=0.2)
    assert throughput.bytes_per_s == pytest.approx(1e6)


def test_frames_on_the_way_together_share_the_line() -> None:
    """Two written at once, acknowledged one after the other: each took a second, not two."""
    throughput = Throughput()
    throughput.acknowledged(1_000_000, began_at=0.0, now=1.2, rtt_s=0.2)
    throughput.acknowledged(1_000_000, began_at=0.0, now=2.2, rtt_s=0.2)
    assert throughput.bytes_per_s == pytest.approx(1e6)


def test_small_frames_tell_nothing_and_the_mean_follows_slowly() -> None:
    throughput = Throughput()
    throughput.acknowledged(LEAST_BYTES - 1, began_at=0.0, now=1.0, rtt_s=0.0)
    assert throughput.bytes_per_s is None
    throughput.acknowledged(1_000_000, began_at=2.0, now=3.0, rtt_s=0.0)
    throughput.acknowledged(1_000_000, began_at=4.0, now=14.0, rtt_s=0.0)
    assert 1e5 < (throughput.bytes_per_s or 0) < 1e6


def test_a_round_trip_that_hides_the_transfer_makes_it_fast_and_not_negative() -> None:
    throughput = Throughput()
    throughput.acknowledged(1_000_000, began_at=0.0, now=0.01, rtt_s=0.5)
    assert throughput.bytes_per_s == pytest.approx(1e10)


async def test_both_ends_know_how_fast_large_frames_were():
    a, b = network(1), network(2)
    async with running(a, b), trio.open_nursery() as nursery:
        assert a.bandwidths(b.peer_id) == (None, None)
        nursery.start_soon(post, a, b.peer_id, forward(1), [torch.zeros(500, 500)])
        await next_message(b)
        while b.bandwidths(a.peer_id)[1] is None:
            await trio.sleep(0.05)
        (out, into), (told_out, told) = a.bandwidths(b.peer_id), b.bandwidths(a.peer_id)
        assert out is not None
        assert out > 0
        assert told == out
        assert (into, told_out) == (None, None)  # nothing large went the other way
