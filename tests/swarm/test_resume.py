"""Stopping and going on: the organiser alone, and the whole swarm, on real processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest
from harness import Finished, LawSwarm, Plan, assert_law, collect, reference_of

from node.local_swarm import Daemon

# Alone in its stage, a node writes each step; with a replica it writes when it is stopped.
PLANS = [
    pytest.param(Plan(stages=1, holders=1, data_nodes=1, quota=4), id="alone"),
    pytest.param(Plan(stages=2, quota=4), id="replicated", marks=pytest.mark.slow),
]
STOP_LIMIT_S, RESUME_LIMIT_S = 60.0, 180.0


class Pausing:
    """A law swarm that is stopped in the middle and started again on what it left."""

    def __init__(self, root: Path, plan: Plan) -> None:
        self.swarm = LawSwarm(root, plan)

    def reach(self, step: int) -> None:
        """Wait until the organiser has finished a step."""
        self.swarm.wait_until(
            lambda: any(s.step >= step for s in self.swarm.organiser.steps(step - 1)),
            f"step {step}", RESUME_LIMIT_S,
        )  # fmt: skip

    def stop(self, daemons: Sequence[Daemon]) -> None:
        """SIGTERM to all at once, and again to who waits for one that has gone."""
        for number in (signal.SIGTERM, signal.SIGTERM):
            for daemon in daemons:
                daemon.is_wanted = False
                daemon.send(number)
            self._wait_for_end(daemons, STOP_LIMIT_S / 2)
        assert not any(daemon.is_running for daemon in daemons)

    def _wait_for_end(self, daemons: Sequence[Daemon], limit_s: float) -> None:
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.process.wait(limit_s)

    def start(self, daemons: Sequence[Daemon]) -> None:
        """Start them again on what they left, but for the weights of the step before."""
        for daemon in daemons:
            shutil.rmtree(daemon.state_dir / "weights", ignore_errors=True)
            daemon.client.close()
            self.swarm.spawn(daemon.role, daemon.stage, name=daemon.name)


def snapshots_of(daemon: Daemon) -> dict[int, str]:
    """The digest of each state on a daemon's disk, by step; each file is what its name says."""
    found = {}
    for path in daemon.state_dir.glob("snapshots/stage-*"):
        _, _, _, step, digest = path.stem.split("-")
        assert sha256(path.read_bytes()).hexdigest() == digest
        found[int(step)] = digest
    return found


def decisions_of(daemon: Daemon) -> list[dict]:
    lines = (daemon.state_dir / "decisions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def events_of(daemon: Daemon, name: str) -> list[dict]:
    lines = (daemon.state_dir / "log.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]


def logged_steps(finished: Finished) -> list[int]:
    organiser = finished.root / "data-1" / "steps.jsonl"
    return [json.loads(line)["step"] for line in organiser.read_text().splitlines()]


def train_to_the_end(pausing: Pausing) -> Finished:
    """The steps of both lives as one run."""
    pausing.swarm.wait_for_weights(RESUME_LIMIT_S)
    finished = collect(pausing.swarm)
    assert logged_steps(finished) == list(range(20))
    for logged in finished.log:  # what was drawn does not depend on the stop
        assert [slot for _, slot in logged.entries] == list(range(4))
    assert_law(finished, reference_of(finished))
    return finished


@pytest.mark.timeout(400)
@pytest.mark.parametrize("plan", PLANS)
def test_a_swarm_that_was_stopped_as_a_whole_goes_on(plan: Plan, tmp_path: Path) -> None:
    pausing = Pausing(tmp_path, plan)
    with pausing.swarm as swarm:
        swarm.start()
        pausing.reach(9)
        everybody = list(swarm.daemons)
        pausing.stop(everybody)
        decided = decisions_of(swarm.organiser)[-1]
        step = decided["step"]
        assert 9 < step < 20
        for daemon in everybody:  # bit for bit what the swarm decided on
            assert snapshots_of(daemon)[step] == decided["digests"][daemon.stage or 0], daemon.name
        pausing.start(everybody)
        train_to_the_end(pausing)
        for daemon in swarm.daemons:
            loaded = events_of(daemon, "snapshot_loaded")
            assert loaded, daemon.name
            assert loaded[0]["step"] == step
            assert not events_of(daemon, "state_transferred"), daemon.name
    assert not swarm.leftovers()


@pytest.mark.timeout(400)
def test_an_organiser_that_was_stopped_alone_goes_on_with_those_who_stayed(tmp_path: Path) -> None:
    pausing = Pausing(tmp_path, Plan(stages=1, holders=1, data_nodes=1, quota=4))
    with pausing.swarm as swarm:
        swarm.start()
        pausing.reach(9)
        organiser = swarm.organiser
        invite = swarm.invite
        pausing.stop([organiser])
        stayed = [daemon for daemon in swarm.daemons if daemon is not organiser]
        pausing.start([organiser])
        swarm.wait_until(lambda: bool(swarm._read_invite()), "the invite", RESUME_LIMIT_S)
        assert swarm._read_invite() == invite  # on the same ports: it stays valid
        train_to_the_end(pausing)
        assert all(daemon.is_running for daemon in stayed)
        begun = [d["begun"] for d in decisions_of(swarm.organiser) if d["begun"]]
        assert begun, "the data node's work in the step is lost, and must be done again"
    assert not swarm.leftovers()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_is_alone_in_its_stage_keeps_its_promise_through_a_power_cut(tmp_path: Path) -> None:
    pausing = Pausing(tmp_path, Plan(stages=1, holders=1, data_nodes=1, quota=4))
    with pausing.swarm as swarm:
        swarm.start()
        pausing.reach(5)
        everybody = list(swarm.daemons)
        for daemon in everybody:
            swarm.kill(daemon.name)
        pausing.start(everybody)
        swarm.wait_for_weights(RESUME_LIMIT_S)
        for daemon in swarm.daemons:
            assert events_of(daemon, "snapshot_loaded"), daemon.name
            assert not events_of(daemon, "state_transferred"), daemon.name
        steps = logged_steps(collect(swarm))
        assert steps == sorted(set(steps))  # the line of one may be lost, none is there twice
        assert set(range(20)) - set(steps) <= {min(set(range(20)) - set(steps), default=0)}
    assert not swarm.leftovers()
