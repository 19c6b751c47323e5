"""What is measured becomes the costs that flows are chosen by."""

from __future__ import annotations

import pytest
from step_kit import PEERS

from node.transport.throughput import LEAST_BYTES, Throughput
from protocol.routing.costs import (
    BYTES_PER_S,
    COMPUTE_S,
    LATENCY_S,
    Bandwidths,
    MeasuredCosts,
    transfer_s,
)

MBIT = 125_000.0


def costs_of(
    rtt_s: float | None = None,
    bandwidths: Bandwidths = (None, None),
    means_s: tuple[float | None, float | None] = (None, None),
) -> MeasuredCosts:
    return MeasuredCosts(
        1_000_000, lambda _: rtt_s, lambda _: bandwidths, pass_means_s=lambda: means_s
    )


def test_a_home_line_is_as_slow_as_its_two_directions_together() -> None:
    """100 Mbit/s down and 10 up: 0.08 s and 0.8 s for a megabyte."""
    assert transfer_s(1e6, 10 * MBIT, 100 * MBIT) == pytest.approx(0.44)
    paper = transfer_s(1e6, 10 * MBIT, 100 * MBIT, mean_bandwidth=True)
    assert paper == pytest.approx(0.1454, abs=1e-4)


def test_a_link_costs_its_latency_and_the_mean_transfer() -> None:
    assert costs_of(0.1, (10 * MBIT, 100 * MBIT)).link_s(PEERS[0]) == pytest.approx(0.05 + 0.44)
    assert costs_of(0.1, (10 * MBIT, None)).link_s(PEERS[0]) == pytest.approx(0.05 + 0.8)
    assert costs_of(0.1, (None, 10 * MBIT)).link_s(PEERS[0]) == pytest.approx(0.05 + 0.8)


def test_before_anything_was_measured_there_are_defaults() -> None:
    assert costs_of().link_s(PEERS[0]) == pytest.approx(LATENCY_S + 1e6 / BYTES_PER_S)
    assert costs_of().compute_s() == COMPUTE_S


def test_compute_is_the_mean_of_both_passes() -> None:
    assert costs_of(means_s=(1.0, 2.0)).compute_s() == 1.5
    assert costs_of(means_s=(1.0, None)).compute_s() == 1.0


# --- measuring -----------------------------------------------------------------------------


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
