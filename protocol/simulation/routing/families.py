"""Networks to try a router on: the random families of spec 1.7, and swarms in real regions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from protocol.errors import ConfigError
from protocol.simulation.routing.network import Matrix, RoutingNetwork
from protocol.simulation.routing.regions import BYTES_PER_MBIT, DTFM, Regions

PAYLOAD_BYTES = 8 * 2**20  # an activation [1, 2048, 2048] in bf16
_HINT = "Take more nodes: each stage needs a holder, beside the data nodes."


@dataclass(frozen=True)
class Family:
    """Random networks: capacities and link costs are drawn evenly from these ranges.

    The costs d_ij (s) are what GWTF's prototype draws; messages take ``latency_s``, and the rest
    of d_ij is the transfer of a payload.
    """

    num_nodes: int
    num_stages: int = 8
    num_data_nodes: int = 1
    capacity: tuple[int, int] = (1, 5)
    cost_s: tuple[float, float] = (20.0, 100.0)
    latency_s: tuple[float, float] = (0.02, 0.08)
    demand: int | None = None

    def network(self, seed: int) -> RoutingNetwork:
        """Draw one network."""
        rng = np.random.default_rng(seed)
        stages = spread(self.num_nodes, self.num_stages, self.num_data_nodes)
        count = self.num_nodes
        latency_s = _symmetric(rng.uniform(*self.latency_s, (count, count)))
        cost_s = _symmetric(rng.uniform(*self.cost_s, (count, count)))
        network = RoutingNetwork(
            names=_names(stages),
            stages=stages,
            capacities=_capacities(rng, stages, self.capacity),
            demands=(0,) * count,
            compute_s=(0.0,) * count,
            latency_s=latency_s,
            bandwidth_bytes_s=PAYLOAD_BYTES / (cost_s - latency_s),
            payload_bytes=PAYLOAD_BYTES,
        )
        return network.with_demand(self.demand)


N33 = Family(33, capacity=(2, 5), cost_s=(1.0, 10.0))
N97 = Family(97)
N97_WIDE = Family(97, capacity=(1, 20), cost_s=(1.0, 100.0))
N1001 = Family(1001, num_stages=10, demand=250)


def of_size(num_nodes: int, num_stages: int, num_data_nodes: int = 1) -> Family:
    """Return the spec's family for a swarm of this size."""
    base = N33 if num_nodes <= 33 else N97
    return replace(base, num_nodes=num_nodes, num_stages=num_stages, num_data_nodes=num_data_nodes)


def in_regions(
    num_nodes: int,
    num_stages: int,
    seed: int,
    *,
    num_data_nodes: int = 1,
    regions: Regions = DTFM,
    capacity: tuple[int, int] = (2, 5),
    compute_s: tuple[float, ...] = (0.2, 0.4, 0.8),
    payload_bytes: float = PAYLOAD_BYTES,
) -> RoutingNetwork:
    """Draw a swarm whose nodes lie in real regions; ``compute_s`` lists their speeds."""
    rng = np.random.default_rng(seed)
    stages = spread(num_nodes, num_stages, num_data_nodes)
    places = rng.integers(len(regions.names), size=num_nodes)
    latency_s, bandwidth_bytes_s = regions.matrices()
    network = RoutingNetwork(
        names=_names(stages),
        stages=stages,
        capacities=_capacities(rng, stages, capacity),
        demands=(0,) * num_nodes,
        compute_s=tuple(rng.choice(compute_s, size=num_nodes).tolist()),
        latency_s=latency_s[np.ix_(places, places)],
        bandwidth_bytes_s=bandwidth_bytes_s[np.ix_(places, places)],
        payload_bytes=payload_bytes,
        regions=tuple(regions.names[k] for k in places),
    )
    return network.with_demand()


def at_home(network: RoutingNetwork, seed: int) -> RoutingNetwork:
    """Put each node behind a home link, which sends at a tenth of what it receives at."""
    rng = np.random.default_rng(seed)
    down = rng.choice((100.0, 250.0, 500.0), size=network.num_nodes) * BYTES_PER_MBIT
    between = np.minimum(network.bandwidth_bytes_s, down[None, :])
    return replace(network, bandwidth_bytes_s=np.minimum(between, down[:, None] / 10))


def spread(num_nodes: int, num_stages: int, num_data_nodes: int) -> tuple[int, ...]:
    """Return the stage of each node: data nodes first, the others evenly over the stages."""
    num_holders = num_nodes - num_data_nodes
    if num_stages < 1 or num_data_nodes < 1 or num_holders < num_stages:
        raise ConfigError(
            f"{num_nodes} nodes are too few: {num_stages} stages, data nodes: {num_data_nodes}",
            _HINT,
        )
    return (0,) * num_data_nodes + tuple(
        1 + k * num_stages // num_holders for k in range(num_holders)
    )


def _symmetric(matrix: Matrix) -> Matrix:
    """Both directions alike: d_ij is a mean of the two anyway."""
    upper = np.triu(matrix, 1)
    return upper + upper.T + np.diag(np.diag(matrix))


def _capacities(
    rng: np.random.Generator, stages: tuple[int, ...], capacity: tuple[int, int]
) -> tuple[int, ...]:
    drawn: npt.NDArray[np.int64] = rng.integers(capacity[0], capacity[1] + 1, size=len(stages))
    return tuple(int(c) if stage else 0 for c, stage in zip(drawn, stages, strict=True))


def _names(stages: tuple[int, ...]) -> tuple[str, ...]:
    """d1, d2, ... for data nodes; stage and number, as 3.7, for holders."""
    counts: dict[int, int] = {}
    names = []
    for stage in stages:
        counts[stage] = counts.get(stage, 0) + 1
        names.append(f"{stage}.{counts[stage]}" if stage else f"d{counts[stage]}")
    return tuple(names)
