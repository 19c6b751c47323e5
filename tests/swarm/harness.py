"""Runs a swarm of real daemons to its end and reads what it left, for comparison with the law."""

from __future__ import annotations

import json
import signal
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from reference.law import LawBroken, assert_equal_outcomes
from reference.loop import LoggedStep, Outcome, run
from reference.recipe import Text, documents_in, initial_weights
from reference.sample import sample_documents, write_documents
from safetensors.torch import load_file

from node.config import FAULT_VARIABLE
from node.local_swarm import Daemon, LocalSwarm
from node.status import NodeStatus
from protocol.errors import ShoalError
from protocol.keys import PeerId
from protocol.manifest import (
    DataSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    RecoverySpec,
    ScheduleSpec,
    TrainingSpec,
)

RUN_LIMIT_S = 240.0
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Plan:
    """The swarm of a law test: small enough that a step takes about a second."""

    steps: int = 20
    stages: int = 3
    holders: int = 2
    data_nodes: int = 2
    quota: int = 8
    faults: Mapping[str, str] = field(default_factory=dict)  # daemon name -> point@step
    replaced: bool = True  # whether a killed holder gets a successor
    recovery: Literal["none", "checkfree"] = "none"

    def manifest(self, data_nodes: Sequence[PeerId]) -> Manifest:
        """6 layers of width 64, AdamW with warm-up and clipping, validation now and then."""
        return Manifest(
            name="law",
            organiser=data_nodes[0],
            model=ModelSpec(
                layers=6, width=64, heads=4, kv_heads=2, feed_forward=160, vocabulary=257,
                context=64,
            ),
            pipeline=PipelineSpec(
                stages=self.stages, min_holders=self.holders, min_data_nodes=self.data_nodes
            ),
            training=TrainingSpec(
                steps=self.steps, quota=self.quota, microbatch=2, clip_norm=1.0, seed=11,
                schedule=ScheduleSpec(kind="cosine", warmup_steps=4),
            ),
            data=DataSpec(seed=12, eval_every=10, eval_microbatches=2),
            recovery=RecoverySpec(method=self.recovery),
        )  # fmt: skip


class LawSwarm(LocalSwarm):
    """A local swarm in which daemons die where the plan says, and successors take their place."""

    def __init__(self, root: Path, plan: Plan) -> None:
        self.plan = plan
        self.text = write_documents(root / "text", sample_documents())
        self.killed: list[Daemon] = []
        self.successors: list[Daemon] = []
        self.last_status: dict[str, NodeStatus] = {}
        super().__init__(
            root, plan.manifest, holders=plan.holders, data_nodes=plan.data_nodes, data=[self.text]
        )

    def spawn(
        self,
        role: Any,
        stage: int | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Daemon:
        """Start a daemon, with its fault if the plan has one for it."""
        name = name or self._free_name(role, stage)
        fault = self.plan.faults.get(name)
        added = {FAULT_VARIABLE: fault} if fault else {}
        return super().spawn(role, stage, env={**(env or {}), **added}, name=name)

    def check(self) -> None:
        """Expect the deaths of the plan, and no other."""
        for daemon in list(self.daemons):
            is_planned = daemon.name in self.plan.faults and daemon.is_wanted
            if is_planned and daemon.process.poll() == -signal.SIGKILL:
                daemon.is_wanted = False
                self.killed.append(daemon)
                if daemon.role == "volunteer" and self.plan.replaced:
                    self.replace(daemon)
        super().check()

    def replace(self, daemon: Daemon) -> None:
        """Start the successor of a holder that was killed."""
        self.successors.append(self.spawn("volunteer", daemon.stage))

    def train(self) -> None:
        """Start everybody and wait until whoever lives has written its weights."""
        self.start()
        self.wait_for_weights(RUN_LIMIT_S)

    def wait_for_weights(self, limit_s: float) -> None:
        """Wait until whoever lives has written its weights."""

        def is_done() -> bool:
            return all(
                any(self._weight_files(daemon)) for daemon in self.daemons if daemon.is_wanted
            )

        self.wait_until(is_done, "the weights of every node", limit_s)
        self._remember_status()

    def survivors(self) -> list[Daemon]:
        """The daemons that nobody killed."""
        return [daemon for daemon in self.daemons if daemon not in self.killed]

    def weights_of(self, daemon: Daemon) -> Weights:
        """What a daemon exported; gains, which no stage trains, must be one and are left out."""
        found: Weights = {}
        for path in self._weight_files(daemon):
            found.update(load_file(path))
        gains = {name for name in found if "norm" in name}
        assert all(torch.equal(found[name], torch.ones_like(found[name])) for name in gains)
        return {name: weight for name, weight in found.items() if name not in gains}

    def _weight_files(self, daemon: Daemon) -> list[Path]:
        return sorted(daemon.state_dir.glob("weights/*.safetensors"))

    def _remember_status(self) -> None:
        """Ask whoever lives, on a busy machine more than once."""
        wanted = [daemon for daemon in self.daemons if daemon.is_wanted]
        for daemon in wanted:
            answers: list[NodeStatus] = []
            self.wait_until(lambda d=daemon, a=answers: _hears(d, a), f"{daemon.name} to answer")
            self.last_status[daemon.name] = answers[-1]
            daemon.stage = answers[-1].stage  # what a volunteer that named none has found


@dataclass
class Finished:
    """What a run left: its outcome, and by whom it was computed."""

    root: Path
    manifest: dict[str, Any]
    outcome: Outcome
    log: list[LoggedStep]
    rosters: dict[int, list[list[str]]]
    weights: dict[str, Weights]  # by daemon
    stages: dict[str, int]  # stage by daemon
    peers: dict[str, str]  # PeerID by daemon, the killed ones too
    killed: list[str]
    successors: list[str]
    status: dict[str, NodeStatus]
    traffic_bytes: int  # over loopback, counted by the kernel

    def joined(self, name: str) -> bool:
        """Whether a daemon belonged to some step."""
        members = {peer for roster in self.rosters.values() for stage in roster for peer in stage}
        return self.peers[name] in members


def run_swarm(
    root: Path,
    plan: Plan,
    inspect: Callable[[LawSwarm], None] = lambda swarm: None,
    kind: type[LawSwarm] = LawSwarm,
) -> Finished:
    """Train by ``plan`` under ``root``; ``inspect`` sees the daemons before they are stopped.

    Nothing may be left running.
    """
    before = _loopback_bytes()
    with kind(root, plan) as swarm:
        try:
            swarm.train()
            traffic_bytes = _loopback_bytes() - before
            inspect(swarm)
        except ShoalError:
            _print_outputs(swarm)
            raise
    leftovers = swarm.leftovers()
    assert not leftovers, leftovers
    return collect(swarm, traffic_bytes)


def reference_of(finished: Finished, rebuilt: Mapping[int, int] | None = None) -> Outcome:
    """The independent loop, over the microbatches that the swarm's log names.

    ``rebuilt`` names the stages that were rebuilt, by step.
    """
    text = Text(finished.manifest, documents_in(finished.root / "text"))
    weights = initial_weights(finished.manifest)
    return run(finished.manifest, weights, finished.log, text.draw, rebuilt)


def assert_law(finished: Finished, reference: Outcome) -> None:
    """All steps were made; replicas are bit-identical; losses and weights are the reference's."""
    assert sorted(finished.outcome.losses) == list(range(finished.manifest["training"]["steps"]))
    for weights in finished.weights.values():
        for name, weight in weights.items():
            if not torch.equal(weight, finished.outcome.weights[name]):
                raise LawBroken(f"replicas differ in {name}")
    assert_equal_outcomes(finished.outcome, reference)


def collect(swarm: LawSwarm, traffic_bytes: int = 0) -> Finished:
    """Read what the daemons that live have left."""
    survivors = swarm.survivors()
    weights = {daemon.name: swarm.weights_of(daemon) for daemon in survivors}
    losses, log, rosters = _read_steps(survivors)
    merged = {name: weight for each in weights.values() for name, weight in each.items()}
    everybody = [*survivors, *swarm.killed]
    return Finished(
        root=swarm.root,
        manifest=tomllib.loads((swarm.organiser.state_dir / "manifest.toml").read_text()),
        outcome=Outcome(losses, merged),
        log=log,
        rosters=rosters,
        weights=weights,
        stages={daemon.name: daemon.stage or 0 for daemon in everybody},
        peers={daemon.name: daemon.peer_id for daemon in everybody},
        killed=[daemon.name for daemon in swarm.killed],
        successors=[daemon.name for daemon in swarm.successors],
        status=swarm.last_status,
        traffic_bytes=traffic_bytes,
    )


def _read_steps(
    survivors: Sequence[Daemon],
) -> tuple[dict[int, float], list[LoggedStep], dict[int, list[list[str]]]]:
    """Read steps.jsonl of the data nodes that live; they must tell the same of each step."""
    told: dict[int, dict[str, Any]] = {}
    for daemon in survivors:
        if daemon.role != "data":
            continue
        for line in (daemon.state_dir / "steps.jsonl").read_text().splitlines():
            entry = json.loads(line)
            other = told.setdefault(entry["step"], entry)
            assert other["loss"] == entry["loss"], f"two losses of step {entry['step']}"
            assert _counted(other) == _counted(entry), f"two logs of step {entry['step']}"
    steps = [told[step] for step in sorted(told)]
    return (
        {entry["step"]: entry["loss"] for entry in steps},
        [LoggedStep(entry["step"], _counted(entry)) for entry in steps],
        {entry["step"]: entry["roster"] for entry in steps},
    )


def _counted(entry: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """What a step's entries name, each (data node, slot) once at most."""
    pairs = [(e["data_node"], e["slot"]) for e in entry["entries"]]
    assert len(set(pairs)) == len(pairs), f"step {entry['step']} counts a microbatch twice"
    return tuple(sorted(pairs, key=lambda pair: (pair[1], pair[0])))


def _print_outputs(swarm: LawSwarm) -> None:
    """Show pytest's reader the end of what each daemon wrote."""
    for daemon in swarm.daemons:
        print(f"--- {daemon.name}, exit status {daemon.process.poll()}, {daemon.status()}")
        print("\n".join(daemon.last_lines()))


def _hears(daemon: Daemon, answers: list[NodeStatus]) -> bool:
    """Whether a daemon answers; what it says goes to ``answers``."""
    status = daemon.status()
    answers += [] if status is None else [status]
    return bool(answers)


def _loopback_bytes() -> int:
    return psutil.net_io_counters(pernic=True)["lo"].bytes_sent
