"""A network to route on: who is there, what each can carry, and what lies between them.

The cost of a link is that of GWTF (spec 1.1): the mean of the forward and the backward trip,

    d_ij = (c_i + c_j) / 2 + (latency_ij + latency_ji) / 2 + size / 2 (1 / b_ij + 1 / b_ji)

with compute seconds c, latencies in s, bandwidths b in bytes/s. The paper averages the bandwidths,
2 size / (b_ij + b_ji), which is three times too good for a home link of 100 and 10 Mbit/s;
``is_arithmetic`` chooses that form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from protocol.keys import PeerId

Matrix = npt.NDArray[np.float64]


def peer_at(index: int) -> PeerId:
    """Return the name that the node with this index has in messages: as long as a real one."""
    return PeerId(f"12D3KooW{index:044d}")


@dataclass(frozen=True, eq=False)
class RoutingNetwork:
    """Nodes by index. Stage 0: data nodes, whose ``demands`` are the flows that they want.

    ``capacities``: flows that a holder can carry at once; ``latency_s`` and ``bandwidth_bytes_s``
    [N, N] lead from the row to the column; their diagonals mean nothing.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]
    capacities: tuple[int, ...]
    demands: tuple[int, ...]
    compute_s: tuple[float, ...]
    latency_s: Matrix
    bandwidth_bytes_s: Matrix
    payload_bytes: float
    regions: tuple[str, ...] = ()
    is_arithmetic: bool = False

    @property
    def num_nodes(self) -> int:
        """How many nodes there are, data nodes included."""
        return len(self.names)

    @cached_property
    def num_stages(self) -> int:
        """The number of stages that holders serve."""
        return max(self.stages)

    @cached_property
    def data_nodes(self) -> tuple[int, ...]:
        """The indices of the data nodes."""
        return self.holders_of(0)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The indices of all nodes that are not data nodes."""
        return tuple(i for i, stage in enumerate(self.stages) if stage > 0)

    def holders_of(self, stage: int) -> tuple[int, ...]:
        """Return the indices of the nodes of one stage."""
        return tuple(i for i, own in enumerate(self.stages) if own == stage)

    @cached_property
    def link_s(self) -> Matrix:
        """Latency and transfer, the mean of both directions: the part of d_ij between nodes."""
        latency_s = (self.latency_s + self.latency_s.T) / 2
        if self.is_arithmetic:
            transfer_s = (
                2 * self.payload_bytes / (self.bandwidth_bytes_s + self.bandwidth_bytes_s.T)
            )
        else:
            slowness = 1 / self.bandwidth_bytes_s
            transfer_s = self.payload_bytes / 2 * (slowness + slowness.T)
        total_s: Matrix = latency_s + transfer_s
        return total_s

    @cached_property
    def cost_s(self) -> Matrix:
        """The cost d_ij of each link, in s."""
        compute_s = np.asarray(self.compute_s)
        total_s: Matrix = self.link_s + (compute_s[:, None] + compute_s[None, :]) / 2
        return total_s

    def max_flow(self, alive: Iterable[int] | None = None) -> int:
        """Return the flows that fit at most. All reach all, so it is the least of the stages."""
        present = set(range(self.num_nodes)) if alive is None else set(alive)
        room = [0] * (self.num_stages + 1)
        for i in present:
            room[self.stages[i]] += self.demands[i] if self.stages[i] == 0 else self.capacities[i]
        return min(room)

    def with_demand(self, total: int | None = None) -> RoutingNetwork:
        """Share ``total`` flows (None: all that the smallest stage carries) among data nodes."""
        if total is None:
            stages = range(1, self.num_stages + 1)
            total = min(sum(self.capacities[i] for i in self.holders_of(s)) for s in stages)
        shares = even_shares(total, len(self.data_nodes))
        demands = [0] * self.num_nodes
        for node, share in zip(self.data_nodes, shares, strict=True):
            demands[node] = share
        return replace(self, demands=tuple(demands))


def even_shares(total: int, num_parts: int) -> list[int]:
    """Cut ``total`` into parts that differ by one at most."""
    return [total // num_parts + (k < total % num_parts) for k in range(num_parts)]


def assign_stages(
    stages: Sequence[int | None], capacities: Sequence[int], num_stages: int
) -> tuple[int, ...]:
    """Give each node without a stage the one with the least capacity, the largest node first."""
    room = [0] * (num_stages + 1)
    for stage, capacity in zip(stages, capacities, strict=True):
        if stage is not None:
            room[stage] += capacity
    found = list(stages)
    free = [i for i, stage in enumerate(stages) if stage is None]
    for i in sorted(free, key=lambda i: (-capacities[i], i)):
        stage = min(range(1, num_stages + 1), key=lambda s: (room[s], s))
        found[i] = stage
        room[stage] += capacities[i]
    return tuple(stage for stage in found if stage is not None)
