"""What a microbatch costs on the way: compute seconds of a node, and seconds across a link.

The link cost is that of GWTF (spec 1.1) without the compute terms: the mean of the forward and the
backward trip, (latency there + latency back) / 2 + the transfer. Deviation: transfer times are
averaged, ``bytes / 2 * (1/up + 1/down)``, and not bandwidths: their mean is three times too
optimistic for a line of 100 Mbit/s down and 10 up. ``mean_bandwidth`` restores the paper's form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.keys import PeerId

Bandwidths = tuple[float | None, float | None]  # bytes per second out and in

# Of what was never measured: a home line at the other end of a continent, a slow processor.
LATENCY_S = 0.05
BYTES_PER_S = 2.5e6
COMPUTE_S = 0.1


def transfer_s(num_bytes: float, out: float, into: float, *, mean_bandwidth: bool = False) -> float:
    """Return the mean seconds of a tensor's way out and its gradient's way in, or in reverse."""
    if mean_bandwidth:
        return 2 * num_bytes / (out + into)
    return num_bytes / 2 * (1 / out + 1 / into)


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Implements ``Costs`` on the measurements of the ports.

    ``boundary_bytes`` is the size of an activation on the wire. What is known in one direction
    alone counts for both.
    """

    boundary_bytes: int
    rtt_s: Callable[[PeerId], float | None]
    bandwidths: Callable[[PeerId], Bandwidths]
    pass_means_s: Callable[[], tuple[float | None, float | None]]
    mean_bandwidth: bool = False

    def compute_s(self) -> float:
        """The mean of a microbatch's forward and backward pass on this node."""
        forward_s, backward_s = self.pass_means_s()
        known = [seconds for seconds in (forward_s, backward_s) if seconds is not None]
        return sum(known) / len(known) if known else COMPUTE_S

    def link_s(self, peer: PeerId) -> float:
        """Latency and transfer between this node and a peer, the mean of both directions."""
        rtt_s, (out, into) = self.rtt_s(peer), self.bandwidths(peer)
        latency_s = LATENCY_S if rtt_s is None else rtt_s / 2
        out, into = out or into or BYTES_PER_S, into or out or BYTES_PER_S
        return latency_s + transfer_s(
            self.boundary_bytes, out, into, mean_bandwidth=self.mean_bandwidth
        )
