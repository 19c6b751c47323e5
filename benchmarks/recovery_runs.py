"""The arms of ``benchmarks/recovery.py``: what each run does, and its log of finished runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recovery_swarm import (
    STAGES,
    WARMUP_STEPS,
    Rebuild,
    Swarm,
    Weights,
    copy_at_the_ends,
    copy_neighbour,
    deletion_costs,
    forget_moments,
    initial,
    manifest_of,
    plain,
    rebuild_at_random,
    rebuild_by_plan,
    text,
)

from protocol.manifest import RecoverySpec

FAILURE_RATE = 0.008  # per stage and step
BEFORE_STEPS = 300  # of training that all arms of a seed have in common
EVAL_EVERY = 10
REGAIN_LIMIT = 60  # steps after a failure in which the old loss is looked for
FINAL_MICROBATCHES = 8
CHECKFREE = RecoverySpec(method="checkfree")
PLUS = RecoverySpec(method="checkfree_plus")


@dataclass(frozen=True)
class Arm:
    """One way to live with failures; ``failures`` says of which stages."""

    name: str
    failures: str  # "none", "interior", "all"
    rebuild: Rebuild = rebuild_by_plan
    recovery: RecoverySpec = CHECKFREE


ESSENTIAL = (
    Arm("none", "none"),
    Arm("random", "interior", rebuild_at_random),
    Arm("CheckFree sq", "interior"),
    Arm("uniform", "interior", recovery=RecoverySpec(method="checkfree", omega_mode="uniform")),
    Arm("copy", "interior", copy_neighbour),
    Arm("CheckFree+ without failures", "none", recovery=PLUS),
    Arm("CheckFree+", "all", recovery=PLUS),
    Arm("naive copy of the ends", "all", copy_at_the_ends),
    Arm("CheckFree l2", "interior", recovery=RecoverySpec(method="checkfree", omega_mode="l2")),
)
ALSO = (
    Arm("moments lost", "interior", forget_moments),
    Arm("CheckFree+ inside", "interior", recovery=PLUS),
    Arm("CheckFree sq, rate x 1.0", "interior",
        recovery=RecoverySpec(method="checkfree", lr_scale=1.0)),
)  # fmt: skip


ARMS = ESSENTIAL + ALSO


def failures(seed: int, steps: int, which: str = "all") -> list[tuple[int, int]]:
    """Return (step, stage) of each loss: the same for all arms of a seed, one stage at a time."""
    rng = np.random.default_rng((seed, 3))
    lost = []
    for step, row in enumerate(rng.random((steps, STAGES)) < FAILURE_RATE, start=1):
        if row.any() and step > WARMUP_STEPS:
            lost.append((step, int(rng.choice(np.flatnonzero(row))) + 1))
    if which == "none":
        return []
    return [(step, k) for step, k in lost if which == "all" or 1 < k < STAGES]


def common_start(seed: int, recovery: RecoverySpec, documents: list[bytes]) -> Weights:
    """Train before anything fails, so that a stage has something to lose."""
    swarm = Swarm(manifest_of(seed, BEFORE_STEPS, recovery), documents)
    stages = range(STAGES + 1)
    swarm.begin([initial(swarm.manifest, k, seed) for k in stages])
    for _ in range(BEFORE_STEPS):
        swarm.step()
    return swarm.weights()


def run(arm: Arm, seed: int, steps: int, start: Weights, documents: list[bytes]) -> dict[str, Any]:
    """Train one arm and return its record."""
    swarm = Swarm(manifest_of(seed, steps, arm.recovery), documents, BEFORE_STEPS)
    swarm.begin(start)
    lost = dict(failures(seed, steps, arm.failures))
    costs = [deletion_costs(swarm, 2)]
    curve, jumps = [(0, swarm.loss())], []
    watched: dict[str, Any] | None = None
    for step in range(1, steps + 1):
        swarm.step()
        if watched or step in lost or step % EVAL_EVERY == 0:
            curve.append((step, swarm.loss()))
        if watched and (curve[-1][1] <= watched["before"] or step in lost):
            is_regained = curve[-1][1] <= watched["before"]
            watched["regained"] = step - watched["step"] if is_regained else None
            watched = None
        elif watched and step - watched["step"] >= REGAIN_LIMIT:
            watched = None
        if step in lost:
            before = curve[-1][1]
            arm.rebuild(swarm, lost[step], len(jumps))
            watched = {"step": step, "stage": lost[step], "before": before, "after": swarm.loss()}
            watched["regained"] = None
            jumps.append(watched)
    costs.append(deletion_costs(swarm, 2))
    return plain({
        "arm": arm.name, "seed": seed, "steps": steps, "final": swarm.loss(FINAL_MICROBATCHES),
        "curve": curve, "jumps": jumps, "deletion": costs, "spent_s": swarm.spent_s,
    })  # fmt: skip


def read_log(path: Path) -> list[dict[str, Any]]:
    """The finished runs of a log; half a line at its end is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def run_all(path: Path, seeds: int, steps: int) -> Iterator[dict[str, Any]]:
    """Do what the log lacks, seed after seed; yield each record as it is written."""
    torch.set_num_threads(1)
    done = {(r["arm"], r["seed"], r["steps"]) for r in read_log(path)}
    documents = text()
    for arms, seed in product((ESSENTIAL, ALSO), range(seeds)):
        starts: dict[str, Weights] = {}
        for arm in arms:
            if (arm.name, seed, steps) in done:
                continue
            method = arm.recovery.method
            if method not in starts:
                recovery = RecoverySpec(method=method)
                starts[method] = common_start(seed, recovery, documents)
            record = run(arm, seed, steps, starts[method], documents)
            with path.open("a") as log:
                log.write(json.dumps(record) + "\n")
            yield record
