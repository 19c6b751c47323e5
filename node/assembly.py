"""What a node is made of, sized for its owner's machine: stages, capacity, limits of frames."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from stages.device import free_bytes
from stages.edge_stage import TorchEdgeStage
from stages.layout import stage_layout
from stages.memory import stage_bytes

MEMORY_SHARE = 0.5  # of what is free at the start, if the owner names no limit
LEAST_CAPACITY = 2  # one in flight, one slot for repairs
MOST_CAPACITY = 8
_FLOAT_BYTES = 4
_MODES = {"auto": (False, True), "always": (True,), "never": (False,)}


@dataclass(frozen=True, slots=True)
class Room:
    """How a node would use its memory at one stage: microbatches at once, whether graphs go."""

    capacity: int
    recompute: bool
    needed_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages that fit into the memory that a node was given, at least one."""

    rooms: Mapping[int, Room]
    spare_bytes: int = 0  # beside them, for those who generate or export

    @property
    def fits(self) -> dict[int, int]:
        """The microbatches that the node can hold, by the stages that fit."""
        return {stage: room.capacity for stage, room in self.rooms.items()}

    @property
    def capacity(self) -> int:
        """What it can hold wherever it goes."""
        return min(self.fits.values())

    @property
    def needed_bytes(self) -> int:
        """What it may use wherever it goes."""
        return max(room.needed_bytes for room in self.rooms.values())


def default_budget(device: str, host_bytes: int | None = None) -> int:
    """Return the memory that a node uses if its owner names no limit: a share of what is free."""
    host = psutil.virtual_memory().available if host_bytes is None else host_bytes
    return int(free_bytes(device, host) * MEMORY_SHARE)


def plan_memory(manifest: Manifest, config: NodeConfig) -> Plan:
    """Find the stages that fit, with capacities; ResourceError if none does, or the named one."""
    budget = config.memory_bytes or default_budget(config.device)
    stages = _possible_stages(manifest, config)
    rooms = {k: room for k in stages if (room := _room(manifest, config, k, budget))}
    if not rooms:
        raise _too_little_memory(manifest, config, stages, budget)
    return Plan(rooms, budget - max(room.needed_bytes for room in rooms.values()))


def _room(manifest: Manifest, config: NodeConfig, stage: int, budget: int) -> Room | None:
    """As many microbatches as fit; graphs are given up before the stage is."""
    wanted = max(LEAST_CAPACITY, min(MOST_CAPACITY, manifest.training.quota))
    for recompute in _MODES[config.recompute]:
        for capacity in range(wanted, LEAST_CAPACITY - 1, -1):
            needed = stage_bytes(manifest, stage, capacity, recompute=recompute)
            if needed <= budget:
                return Room(capacity, recompute, needed)
    return None


def _too_little_memory(
    manifest: Manifest, config: NodeConfig, stages: Sequence[int], budget: int
) -> ResourceError:
    """Say what the smallest possible stage needs, and what would do for the named one."""
    recompute = _MODES[config.recompute][-1]
    least = {k: stage_bytes(manifest, k, LEAST_CAPACITY, recompute=recompute) for k in stages}
    smallest = min(least, key=least.__getitem__)
    needs = f"needs {_mib(least[smallest])} MiB"
    cause = f"no stage fits {_mib(budget)} MiB; the smallest, stage {smallest}, {needs}"
    other = "join a swarm with smaller stages"
    if len(stages) == 1:
        cause = f"stage {smallest} {needs}; this node may use {_mib(budget)} MiB"
    if config.stage == smallest:
        other = "leave --stage out, if another stage may be smaller"
    return ResourceError(
        cause, f"Give the node more memory with --memory {_mib(least[smallest])}MiB, or {other}."
    )


def make_stages(
    manifest: Manifest, config: NodeConfig, plan: Plan, corpus: Corpus | None
) -> Callable[[int], StageState]:
    """Return what makes the initial state of a stage; raise ConfigError if nothing here can."""
    recovery = manifest.recovery
    if recovery.method == "checkfree_plus" or recovery.share_ends:
        raise ConfigError(
            "the manifest asks for a recovery that is not available in this version",
            'Set recovery.method to "checkfree" or "none" and recovery.share_ends to false in a'
            " new manifest.",
        )

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
        return TorchBlockStage(
            manifest, stage, recompute=plan.rooms[stage].recompute, device=config.device
        )

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
