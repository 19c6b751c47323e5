"""Swarms that the simulation tests share."""

from __future__ import annotations

from functools import partial
from typing import Literal

from protocol.manifest import (
    DataSpec,
    Manifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    RecoverySpec,
    SignedManifest,
    TrainingSpec,
    sign,
)
from protocol.simulation.cores import node_core
from protocol.simulation.host import simulation_key
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.world import NodePlan, Simulation

LEARNING_RATE = {"sgd": 0.05, "adamw": 1e-3}


def manifest_of(
    *,
    num_stages: int = 2,
    steps: int = 4,
    quota: int = 4,
    authorities: int = 1,
    min_holders: int = 1,
    model: ModelSpec | None = None,
    microbatch: int = 1,
    optimizer: Literal["sgd", "adamw"] = "sgd",
    recovery: str = "none",
) -> SignedManifest:
    """A manifest whose organiser and authorities are the first nodes."""
    organiser = simulation_key(0)
    model = model or ModelSpec(
        layers=num_stages, width=4, heads=1, kv_heads=1, feed_forward=4, vocabulary=256, context=1
    )
    manifest = Manifest(
        name="simulated",
        organiser=organiser.peer_id,
        authorities=tuple(simulation_key(i).peer_id for i in range(authorities)),
        model=model,
        pipeline=PipelineSpec(
            stages=num_stages, min_holders=min_holders, min_data_nodes=min(2, min_holders)
        ),
        training=TrainingSpec(
            steps=steps,
            quota=quota,
            microbatch=microbatch,
            optimizer=OptimizerSpec(name=optimizer, learning_rate=LEARNING_RATE[optimizer]),
        ),
        data=DataSpec(eval_every=2, eval_microbatches=1),
        recovery=RecoverySpec(method=recovery),
    )
    return sign(manifest, organiser)


def plans_of(
    data_nodes: int, num_stages: int, holders: int, capacity: int = 4
) -> tuple[NodePlan, ...]:
    """Data nodes first, then the holders of stage 1, of stage 2 and so on."""
    stages = [0] * data_nodes + [s for s in range(1, num_stages + 1) for _ in range(holders)]
    return tuple(NodePlan(stage, capacity=capacity) for stage in stages)


def toy_swarm(
    data_nodes: int = 2, num_stages: int = 2, holders: int = 3, *, authorities: int = 1, **options
) -> Simulation:
    """Eight nodes by default, with the toy model."""
    shape = {
        k: options.pop(k) for k in ("steps", "quota", "min_holders", "recovery") if k in options
    }
    signed = manifest_of(num_stages=num_stages, authorities=authorities, **shape)
    plans = options.pop("plans", None) or plans_of(data_nodes, num_stages, holders)
    return Simulation(
        signed,
        plans,
        build=node_core,
        stages=partial(toy_stage, signed.manifest),
        keep=("step_close",),
        **options,
    )
