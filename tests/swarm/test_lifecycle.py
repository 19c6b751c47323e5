"""Real daemons that are told to end, killed, frozen, thawed and started again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from lifecycle_kit import (
    GONE_S,
    TrainingSwarm,
    await_gone,
    can_bind,
    children,
    log_of,
    ports,
    training,
)

from node.launch import STOPPED_STATUS

# Far less than ``drain_s`` (25 s), which a node in a paused swarm once waited out.
SOON_S = 15.0


def stop_while_draining(swarm: TrainingSwarm, name: str, needed: str) -> None:
    """Told twice while the step cannot end, because the node that it needs is frozen."""
    swarm.freeze(needed)
    swarm[name].is_wanted = False
    swarm[name].send(signal.SIGTERM)
    swarm.await_state(name, "draining")
    assert swarm.end(name) < SOON_S
    assert swarm[name].process.returncode == STOPPED_STATUS
    swarm.thaw(needed)


def test_sigterm_in_a_running_and_in_a_paused_swarm(tmp_path: Path) -> None:
    """Once: drained and 0, at once if the step cannot end. Twice: at once, with its own status."""
    with training(tmp_path, stages=2) as swarm:
        processes = children(swarm["stage-1-a"])
        stop_while_draining(swarm, "stage-1-a", needed="data-1")
        await_gone(processes)
        swarm.await_state("data-1", "paused")
        for name in ("stage-2-a", "data-1"):
            assert swarm.end(name) < SOON_S
            assert swarm[name].process.returncode == 0
            assert list((swarm[name].state_dir / "weights").iterdir())


@pytest.mark.slow
def test_sigterm_in_a_running_swarm(tmp_path: Path) -> None:
    """A holder leaves between two steps; then the organiser; then who is left without one."""
    with training(tmp_path, holders=2) as swarm:
        swarm.end("stage-1-a")
        assert swarm["stage-1-a"].process.returncode == 0
        assert not [e for e in log_of(swarm["stage-1-a"]) if e["event"] == "drain_timed_out"]
        swarm.await_roster(1, "stage-1-b")
        swarm.await_steps(2)
        swarm.end("data-1")
        assert swarm["data-1"].process.returncode == 0
        assert swarm.end("stage-1-b") < SOON_S
        assert swarm["stage-1-b"].process.returncode == 0


@pytest.mark.parametrize(
    "after_s",
    [
        pytest.param(0.3, marks=pytest.mark.slow),  # it loads its libraries
        1.5,
        pytest.param(3.0, marks=pytest.mark.slow),  # its side-car starts
    ],
)
def test_sigterm_while_it_starts(after_s: float, tmp_path: Path) -> None:
    with training(tmp_path, starts=False) as swarm:
        daemon = swarm.spawn("data", name="data-1")
        time.sleep(after_s)
        swarm.end("data-1", limit_s=SOON_S)
        assert daemon.process.returncode == 0
        assert "Traceback" not in daemon.output_path.read_text()


@pytest.mark.slow
def test_the_organiser_is_told_twice(tmp_path: Path) -> None:
    with training(tmp_path) as swarm:
        stop_while_draining(swarm, "data-1", needed="stage-1-a")


def test_a_killed_node_leaves_nothing_and_comes_back_as_itself(tmp_path: Path) -> None:
    """Its side-car and p2pd go with it, its ports are free; it gets its stage and place again."""
    with training(tmp_path, holders=2) as swarm:
        victim = swarm["stage-1-a"]
        processes, listened = children(victim), ports(victim)
        assert [p.name() for p in processes][1:] == ["p2pd"]
        assert len(listened) >= 3
        swarm.kill("stage-1-a")
        await_gone(processes, GONE_S)
        swarm.wait_until(lambda: all(map(can_bind, listened)), "its ports to be free", GONE_S)
        left = set(Path("/tmp").glob(f"shoal-sidecar-{victim.pid}-*"))
        swarm.spawn("volunteer", victim.stage, name=victim.name)
        swarm.await_roster(1, "stage-1-a", "stage-1-b")
        assert not [folder for folder in left if folder.exists()]
        swarm.await_steps(2)
        for other in ("data-1", "stage-1-b"):
            known = [peer.peer_id for peer in swarm[other].client.peers()]
            assert known.count(victim.peer_id) == 1
            assert len(known) == 2

        def is_seen() -> bool:  # the roster may count on it before it is back
            peers = swarm["data-1"].client.peers()
            return [(p.stage, p.is_up) for p in peers if p.peer_id == victim.peer_id] == [(1, True)]

        swarm.wait_until(is_seen, "a session with it", 60)
