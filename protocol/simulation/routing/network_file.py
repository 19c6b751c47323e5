"""The file with which anybody brings a network: JSON, read with errors that name the place."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import ConfigError
from protocol.manifest import explain
from protocol.simulation.routing.network import RoutingNetwork, assign_stages

MAX_NODES = 5_000
_HINT = "Correct the network file; docs/network-file.md describes it."

Seconds = Annotated[float, Field(ge=0, le=1e6)]
Rate = Annotated[float, Field(gt=0, le=1e18)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NodeEntry(_Part):
    """One node. Stage 0 is a data node, null wherever a holder is needed most."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    stage: Annotated[int, Field(ge=0, lt=4096)] | None = None
    capacity: Count = 0
    compute_s: Seconds = 0.0
    demand: Count | None = None
    region: Annotated[str, Field(max_length=64)] = ""


class NetworkFile(_Part):
    """A network as a file holds it."""

    nodes: Annotated[tuple[NodeEntry, ...], Field(min_length=2, max_length=MAX_NODES)]
    latency_s: tuple[tuple[Seconds, ...], ...]
    bandwidth_bytes_s: tuple[tuple[Rate, ...], ...]
    payload_bytes: Annotated[float, Field(ge=0, le=1e15)]
    stages: Annotated[int, Field(ge=1, lt=4096)] | None = None

    @property
    def num_stages(self) -> int:
        """The number of stages, by default the highest that a node names."""
        named = [node.stage for node in self.nodes if node.stage is not None]
        return self.stages or max([*named, 1])

    @model_validator(mode="after")
    def _is_square(self) -> NetworkFile:
        for name, rows in (
            ("latency_s", self.latency_s),
            ("bandwidth_bytes_s", self.bandwidth_bytes_s),
        ):
            lengths = [len(row) for row in rows]
            num_nodes = len(self.nodes)
            if len(rows) != num_nodes:
                raise ValueError(f"{name} has {len(rows)} rows for {num_nodes} nodes")
            wrong = next((k for k, length in enumerate(lengths) if length != num_nodes), None)
            if wrong is not None:
                raise ValueError(
                    f"row {wrong} of {name} has {lengths[wrong]} of {num_nodes} numbers"
                )
        return self

    @model_validator(mode="after")
    def _has_distinct_names(self) -> NetworkFile:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise ValueError(f"two nodes are called {node.name!r}")
            seen.add(node.name)
        return self

    @model_validator(mode="after")
    def _is_whole(self) -> NetworkFile:
        stages = [node.stage for node in self.nodes]
        if 0 not in stages:
            raise ValueError("no node has stage 0: a network needs a data node")
        for node in self.nodes:
            if node.stage is not None and node.stage > self.num_stages:
                raise ValueError(f"{node.name!r} has stage {node.stage} of {self.num_stages}")
            if node.stage != 0 and node.demand is not None:
                raise ValueError(
                    f"{node.name!r} has a demand, which only data nodes (stage 0) have"
                )
        missing = set(range(1, self.num_stages + 1)) - set(stages)
        if len(missing) > stages.count(None):
            raise ValueError(f"no node has stage {min(missing)}")
        return self

    def network(self, *, is_arithmetic: bool = False) -> RoutingNetwork:
        """Return the network; data nodes without a demand share what the smallest stage carries."""
        capacities = [node.capacity for node in self.nodes]
        stages = assign_stages([node.stage for node in self.nodes], capacities, self.num_stages)
        network = RoutingNetwork(
            names=tuple(node.name for node in self.nodes),
            stages=stages,
            capacities=tuple(capacities),
            demands=tuple(node.demand or 0 for node in self.nodes),
            compute_s=tuple(node.compute_s for node in self.nodes),
            latency_s=np.array(self.latency_s),
            bandwidth_bytes_s=np.array(self.bandwidth_bytes_s),
            payload_bytes=self.payload_bytes,
            regions=tuple(node.region for node in self.nodes),
            is_arithmetic=is_arithmetic,
        )
        if all(self.nodes[i].demand is None for i in network.data_nodes):
            network = network.with_demand()
        if network.max_flow() == 0:
            raise ConfigError(
                "nothing can flow: a stage has no capacity, or nobody a demand", _HINT
            )
        return network


def parse_network(text: str | bytes, *, is_arithmetic: bool = False) -> RoutingNetwork:
    """Read a network file; raise ConfigError that names what is wrong with it and where."""
    try:
        file = NetworkFile.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"the network file is wrong: {_first(explain(error))}", _HINT) from error
    return file.network(is_arithmetic=is_arithmetic)


def to_file(network: RoutingNetwork) -> str:
    """Return the network as JSON that ``parse_network`` reads."""
    nodes = [
        NodeEntry(
            name=network.names[i],
            stage=network.stages[i],
            capacity=network.capacities[i],
            compute_s=network.compute_s[i],
            demand=network.demands[i] if network.stages[i] == 0 else None,
            region=network.regions[i] if network.regions else "",
        )
        for i in range(network.num_nodes)
    ]
    return NetworkFile(
        nodes=tuple(nodes),
        latency_s=tuple(map(tuple, network.latency_s.tolist())),
        bandwidth_bytes_s=tuple(map(tuple, network.bandwidth_bytes_s.tolist())),
        payload_bytes=network.payload_bytes,
        stages=network.num_stages,
    ).model_dump_json(exclude_defaults=True)


def _first(faults: str, limit: int = 300) -> str:
    """A matrix of strings has a million faults; a person needs the first few."""
    return faults if len(faults) <= limit else faults[:limit].rstrip() + " ..."
