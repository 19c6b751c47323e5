"""The computers of a simulated training run: a network, and what a microbatch costs on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from protocol.errors import ConfigError
from protocol.simulation.routing.network import RoutingNetwork

COMPUTE_S = (0.2, 0.4, 0.8)


@dataclass(frozen=True)
class Workload:
    """What a step is made of, and what its parts weigh.

    A node's ``compute_s`` is the mean of forward and backward; backward takes ``backward_ratio``
    times as long as forward. The loss takes a data node ``head_share`` of its compute seconds.
    ``detect_s`` after a crash everybody knows of it. ``is_exact``: what died in a holder's sum is
    computed again; otherwise the step ends without it.
    """

    steps: int = 5
    microbatches: int = 64
    weight_bytes: float = 200e6
    backward_ratio: float = 2.0
    head_share: float = 0.25
    update_s: float = 0.5
    detect_s: float = 4.0
    is_exact: bool = True


@dataclass(frozen=True, eq=False)
class Fleet:
    """Sites (the rows of the network) and their costs; a node is one life of a computer at a site.

    Node n lives at site n mod num_sites, so that a newcomer at a site is another node.
    """

    network: RoutingNetwork
    workload: Workload

    def __post_init__(self) -> None:
        if not all(self.network.compute_s[n] > 0 for n in self.network.holders):
            raise ConfigError(
                "a holder of this network computes in no time, and training is computing",
                "Give each node its compute_s, in seconds for a microbatch (docs/network-file.md).",
            )

    @property
    def num_sites(self) -> int:
        """The number of computers that there are at any time, data nodes included."""
        return self.network.num_nodes

    def site(self, node: int) -> int:
        """Return where a node lives."""
        return node % self.num_sites

    def capacity(self, node: int) -> int:
        """Return how many microbatches a node holds, beside its repair slot."""
        return self.network.capacities[self.site(node)]

    def forward_s(self, node: int) -> float:
        """Return the seconds of one forward pass through a stage."""
        return self.compute_s(node) * 2 / (1 + self.workload.backward_ratio)

    def backward_s(self, node: int) -> float:
        """Return the seconds of one backward pass through a stage."""
        return self.forward_s(node) * self.workload.backward_ratio

    def head_s(self, node: int) -> float:
        """Return the seconds of a data node's loss."""
        return self.compute_s(node) * self.workload.head_share

    def compute_s(self, node: int) -> float:
        """Return the mean of forward and backward seconds."""
        return self.network.compute_s[self.site(node)]

    def latency_s(self, source: int, target: int) -> float:
        """Return the one-way delay of a small message."""
        return self._latency_s[self.site(source)][self.site(target)]

    def transfer_s(self, source: int, target: int) -> float:
        """Return how long an activation occupies the links of both ends."""
        return self._transfer_s[self.site(source)][self.site(target)]

    def link_s(self, source: int, target: int) -> float:
        """Return latency and transfer, the mean of both directions."""
        return self._link_s[self.site(source)][self.site(target)]

    def cost_s(self, source: int, target: int) -> float:
        """Return GWTF's d_ij."""
        return self._cost_s[self.site(source)][self.site(target)]

    def aggregation_s(self, members: Sequence[int]) -> float:
        """Return the seconds of an exact reduction among the holders of one stage.

        Each member sends 1/R of the weights to each other one, twice, over its one up-link; the
        slowest member's time counts. Latencies of the two rounds overlap.
        """
        share_bytes = self.workload.weight_bytes / len(members)
        return max((self._share_s(a, members, share_bytes) for a in members), default=0.0)

    def _share_s(self, member: int, members: Sequence[int], share_bytes: float) -> float:
        others = [b for b in members if b != member]
        rates = self.network.bandwidth_bytes_s[self.site(member)]
        send_s = sum(share_bytes / float(rates[self.site(b)]) for b in others)
        return 2 * (send_s + max((self.latency_s(member, b) for b in others), default=0.0))

    def decision_s(self) -> float:
        """Return how long a step's end and the next one's opening travel: there and back."""
        leader = self.network.data_nodes[0]
        return 2 * max(self.latency_s(leader, b) for b in range(self.num_sites) if b != leader)

    @cached_property
    def _latency_s(self) -> list[list[float]]:
        rows: list[list[float]] = self.network.latency_s.tolist()
        return rows

    @cached_property
    def _cost_s(self) -> list[list[float]]:
        rows: list[list[float]] = self.network.cost_s.tolist()
        return rows

    @cached_property
    def _link_s(self) -> list[list[float]]:
        rows: list[list[float]] = self.network.link_s.tolist()
        return rows

    @cached_property
    def _transfer_s(self) -> list[list[float]]:
        transfer_s = self.network.payload_bytes / self.network.bandwidth_bytes_s
        rows: list[list[float]] = transfer_s.tolist()
        return rows


def with_compute(network: RoutingNetwork, seed: int) -> RoutingNetwork:
    """Draw compute seconds, as the ten regions have them, for a network that knows costs alone."""
    rng = Random(f"compute {seed}")  # noqa: S311 (a simulation)
    return replace(network, compute_s=tuple(rng.choices(COMPUTE_S, k=network.num_nodes)))
