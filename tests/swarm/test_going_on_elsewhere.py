"""A stopped swarm goes on to the same bits: on other computers, and from an older step.

Two daemons each: with replicas, test_resume and the simulator (test_going_back) do the same.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from harness import Finished, Plan, assert_law, collect, reference_of, run_swarm
from test_resume import RESUME_LIMIT_S, Pausing, events_of, snapshots_of

from node.local_swarm import Daemon
from protocol.keys import PeerId
from protocol.manifest import Manifest

STEPS = 20
EVERY = 4  # steps between snapshots
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class SlotPlan(Plan):
    """One data node and one holder; sums do not depend on the order in which gradients come."""

    steps: int = STEPS
    stages: int = 1
    holders: int = 1
    data_nodes: int = 1
    quota: int = 4

    def manifest(self, data_nodes: Sequence[PeerId]) -> Manifest:
        """The law's manifest, with gradients added in slot order."""
        manifest = super().manifest(data_nodes)
        training = manifest.training.model_copy(update={"sums": "slots"})
        return manifest.model_copy(update={"training": training})


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run that nobody stopped."""
    return run_swarm(tmp_path_factory.mktemp("quiet"), SlotPlan())


def assert_same_bits(finished: Finished, quiet: Finished) -> None:
    assert finished.outcome.losses == quiet.outcome.losses
    assert finished.outcome.weights.keys() == quiet.outcome.weights.keys()
    for name, weight in finished.outcome.weights.items():
        assert torch.equal(weight, quiet.outcome.weights[name]), name
    assert_law(finished, reference_of(finished))


def move(daemon: Daemon) -> None:
    """A copy of the whole directory takes its place, on other ports."""
    original = daemon.state_dir.with_name("original")
    daemon.state_dir.rename(original)
    shutil.copytree(
        original, daemon.state_dir, ignore=shutil.ignore_patterns("ports.json", "*.sock")
    )
    shutil.rmtree(original)


def test_other_computers_go_on_with_copies_of_the_directories(
    tmp_path: Path, quiet: Finished
) -> None:
    """The organiser's whole; of the holders' the snapshots alone, under keys of their own."""
    pausing = Pausing(tmp_path, SlotPlan())
    with pausing.swarm as swarm:
        swarm.start()
        pausing.reach(9)
        organiser, *holders = list(swarm.daemons)
        pausing.stop([organiser, *holders])
        step = max(snapshots_of(organiser))
        for holder in holders:
            assert step in snapshots_of(holder)
        move(organiser)
        pausing.start([organiser])
        swarm.wait_until(lambda: bool(swarm._read_invite()), "the invite", RESUME_LIMIT_S)
        swarm.invite = swarm._read_invite()
        newcomers = []
        for holder in holders:
            swarm.daemons.remove(holder)
            holder.client.close()
            name = f"{holder.name}-elsewhere"
            shutil.copytree(holder.state_dir / "snapshots", tmp_path / name / "snapshots")
            newcomers.append(swarm.spawn("volunteer", holder.stage, name=name))
        assert not {d.peer_id for d in newcomers} & {d.peer_id for d in holders}
        swarm.wait_for_weights(RESUME_LIMIT_S)
        finished = collect(swarm)
        assert all(finished.joined(newcomer.name) for newcomer in newcomers)
        for daemon in swarm.daemons:
            loaded = events_of(daemon, "snapshot_loaded")
            assert loaded[0]["step"] >= step - 1, daemon.name
        assert not events_of(organiser, "went_back")
    assert not swarm.leftovers()
    assert_same_bits(finished, quiet)


def lose_newest_states(daemon: Daemon) -> None:
    """As if it had replicas, which write only what all stages write."""
    for path in daemon.state_dir.glob("snapshots/stage-*"):
        if int(path.stem.split("-")[3]) % EVERY or path.suffix == ".prepared":
            path.unlink()


def test_a_lost_state_takes_the_swarm_back_and_on_to_the_same_bits(
    tmp_path: Path, quiet: Finished
) -> None:
    pausing = Pausing(tmp_path, SlotPlan())
    pausing.swarm.environment["SHOAL_SNAPSHOT_STEPS"] = str(EVERY)
    with pausing.swarm as swarm:
        swarm.start()
        pausing.reach(2 * EVERY + 1)
        everybody = list(swarm.daemons)
        for daemon in everybody:
            swarm.kill(daemon.name)
        lose_newest_states(everybody[1])
        pausing.start(everybody)
        swarm.wait_for_weights(RESUME_LIMIT_S)
        (back,) = events_of(swarm.organiser, "went_back")
        assert back["step"] in range(EVERY, STEPS, EVERY)
        assert back["step"] < back["last_step"]
        finished = collect(swarm)  # which holds that repeated steps had the same losses
    assert not swarm.leftovers()
    assert_same_bits(finished, quiet)
