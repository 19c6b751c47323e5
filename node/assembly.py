"""What a node is made of, sized for its owner's machine: stages, capacity, limits of frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

import psutil

from node.config import NodeConfig
from node.sidecar.averager import HivemindReducer, ReducerOptions
from protocol.averaging import AgreedAverager, Averager, exact_averager
from protocol.core.transfer import CHUNK_BYTES
from protocol.errors import ConfigError, ResourceError
from protocol.manifest import Manifest
from protocol.ports import Network, Observer, StageState
from protocol.wire import Limits
from stages.block_stage import TorchBlockStage
from stages.data import Corpus, load_corpus
from stages.edge_stage import TorchEdgeStage
from stages.layout import stage_layout
from stages.memory import stage_bytes

MEMORY_SHARE = 0.5  # of what is free at the start, if the owner names no limit
LEAST_CAPACITY = 2  # one in flight, one slot for repairs
MOST_CAPACITY = 8
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How a node uses the memory that it was given."""

    capacity: int
    recompute: bool
    needed_bytes: int


def plan_memory(manifest: Manifest, config: NodeConfig) -> Plan:
    """Choose capacity and whether graphs are kept; ResourceError if a possible stage cannot fit."""
    budget = config.memory_bytes or int(psutil.virtual_memory().available * MEMORY_SHARE)
    stages = _possible_stages(manifest, config)
    wanted = max(LEAST_CAPACITY, min(MOST_CAPACITY, manifest.training.quota))
    modes = {"auto": (False, True), "always": (True,), "never": (False,)}[config.recompute]
    for recompute in modes:
        for capacity in range(wanted, LEAST_CAPACITY - 1, -1):
            needed = max(stage_bytes(manifest, k, capacity, recompute=recompute) for k in stages)
            if needed <= budget:
                return Plan(capacity, recompute, needed)
    raise _too_little_memory(
        {k: stage_bytes(manifest, k, LEAST_CAPACITY, recompute=modes[-1]) for k in stages}, budget
    )


def _too_little_memory(least: dict[int, int], budget: int) -> ResourceError:
    """Say what the largest possible stage needs, and which one would fit."""
    largest, smallest = max(least, key=least.__getitem__), min(least, key=least.__getitem__)
    more = f"Give the node more memory with --memory {_mib(least[largest])}MiB"
    hint = f"{more}, or join a swarm with smaller stages."
    if least[smallest] <= budget:
        hint = f"{more}, or name a stage that fits: --stage {smallest}."
    return ResourceError(
        f"stage {largest} needs {_mib(least[largest])} MiB; this node may use {_mib(budget)} MiB",
        hint,
    )


def make_stages(
    manifest: Manifest, config: NodeConfig, plan: Plan, corpus: Corpus | None
) -> Callable[[int], StageState]:
    """Return what makes the initial state of a stage."""

    def make(stage: int) -> StageState:
        if stage == 0:
            if corpus is None:
                raise ConfigError("stage 0 needs text", "Join with --role data.")
            return TorchEdgeStage(manifest, corpus, device=config.device)
        if stage > manifest.pipeline.num_stages:
            raise ConfigError(
                f"stage {stage} does not exist; the swarm has {manifest.pipeline.num_stages}",
                "Leave --stage out, or name one of them.",
            )
        return TorchBlockStage(manifest, stage, recompute=plan.recompute, device=config.device)

    return make


def make_averager(
    manifest: Manifest,
    config: NodeConfig,
    network: Network,
    observer: Observer,
    rng: Random,
    start: Callable[[Callable[[], Awaitable[None]]], None],
) -> Averager:
    """Return what adds up the gradients of a stage; ``start`` runs what it needs beside it."""
    if manifest.averaging == "exact":
        return exact_averager(manifest, network, config.deadlines)
    options = ReducerOptions(
        listen=(f"/ip4/{config.listen_host}/tcp/0",), maps_port=config.listen_host != "127.0.0.1"
    )
    reducer = HivemindReducer(options, config.deadlines, observer, rng)
    start(reducer.run)
    return AgreedAverager(network, config.deadlines, reducer, observer)


def read_corpus(manifest: Manifest, config: NodeConfig) -> Corpus | None:
    """Load a data node's text; None for volunteers."""
    if config.role == "volunteer":
        return None
    return load_corpus(manifest, config.data, config.tokenizer)


def frame_limits(manifest: Manifest) -> Limits:
    """The largest tensor that an honest peer sends: an activation, a shard or a chunk."""
    training, model = manifest.training, manifest.model
    activation = _FLOAT_BYTES * training.microbatch * model.context * model.width
    stages = range(manifest.pipeline.num_stages + 1)
    shard = _FLOAT_BYTES * max(stage_layout(manifest, k).num_elements for k in stages)
    return Limits(max_tensor_bytes=max(activation, shard, CHUNK_BYTES))


def _possible_stages(manifest: Manifest, config: NodeConfig) -> list[int]:
    if config.role != "volunteer":
        return [0]
    if config.stage is not None and config.stage <= manifest.pipeline.num_stages:
        return [config.stage]
    return list(range(1, manifest.pipeline.num_stages + 1))


def _mib(num_bytes: int) -> int:
    return -(-num_bytes // 2**20)
