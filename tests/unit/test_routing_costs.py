"""What is measured becomes the costs that flows are chosen by."""

from __future__ import annotations

import pytest
from step_kit import PEERS

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
