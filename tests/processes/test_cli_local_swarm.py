"""LocalSwarm: daemons are started, watched and ended, whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_daemon import fake_path

from cli.recipe import Recipe
from node.local_swarm import DaemonDiedError, LocalSwarm
from protocol.errors import ResourceError
from protocol.manifest import SignedManifest


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment in which ``python -m node.main`` is the fake daemon."""
    return {"PYTHONPATH": fake_path(tmp_path)}


@pytest.fixture
def swarm(tmp_path: Path, fake: dict[str, str]) -> Iterator[LocalSwarm]:
    recipe = Recipe(layers=2, stages=2, width=32, heads=2)
    made = LocalSwarm(tmp_path / "s", recipe.manifest, data_nodes=2, environment=fake)
    with made:
        yield made
    assert made.leftovers() == []


def test_starts_every_node_with_its_role_and_stage(swarm: LocalSwarm) -> None:
    told: list[str] = []
    swarm.start(told.append)
    names = [(daemon.name, daemon.role, daemon.stage) for daemon in swarm.daemons]
    assert names == [
        ("data-1", "data", None),
        ("data-2", "data", None),
        ("stage-1-a", "volunteer", 1),
        ("stage-1-b", "volunteer", 1),
        ("stage-2-a", "volunteer", 2),
        ("stage-2-b", "volunteer", 2),
    ]
    assert told == ["starting the organiser", "starting 5 more nodes"]
    assert swarm.manifest.authorities == tuple(d.peer_id for d in swarm.daemons[:2])
    organiser = swarm.organiser.state_dir
    signed = SignedManifest.from_toml((organiser / "manifest.toml").read_text())
    assert signed.verify() == swarm.manifest
    assert 'role = "organiser"' in (organiser / "config.toml").read_text()
    joined = (swarm["stage-2-a"].state_dir / "config.toml").read_text()
    assert 'invite = "shoal1:fake"' in joined
    assert "stage = 2" in joined


def test_a_daemon_that_dies_is_named_with_its_output(tmp_path: Path, fake: dict[str, str]) -> None:
    environment = {**fake, "SHOAL_FAKE": "dies"}
    with (
        LocalSwarm(tmp_path / "s", Recipe().manifest, environment=environment) as swarm,
        pytest.raises(DaemonDiedError, match="data-1 ended with status 6") as caught,
    ):
        swarm.start()
    assert caught.value.daemon.last_lines()[-1] == "error[resource]: no memory"


def test_a_daemon_that_was_killed_is_not_missed(swarm: LocalSwarm) -> None:
    swarm.start()
    swarm.kill("stage-1-a")
    swarm.check()
    assert swarm.spawn("volunteer", 1).name == "stage-1-c"
    again = swarm.spawn("volunteer", 1, name="stage-1-a")
    assert swarm["stage-1-a"] is again
    os.kill(again.pid, signal.SIGKILL)
    again.process.wait()
    with pytest.raises(DaemonDiedError, match="stage-1-a"):
        swarm.check()


def test_waiting_ends_after_its_limit(swarm: LocalSwarm) -> None:
    with pytest.raises(ResourceError, match="for the moon"):
        swarm.wait_until(lambda: False, "the moon", limit_s=0.1)


def test_a_frozen_daemon_stops_too(swarm: LocalSwarm) -> None:
    swarm.spawn("data", name="data-1")
    swarm.freeze("data-1")
    swarm.stop()
    assert not swarm.organiser.is_running


def test_a_stubborn_daemon_is_killed(swarm: LocalSwarm) -> None:
    daemon = swarm.spawn("data", env={"SHOAL_FAKE": "stubborn"})
    swarm.wait_until(lambda: daemon.status() is not None, "an answer")
    swarm.stop(patience_s=0.2)
    assert daemon.process.returncode == -signal.SIGKILL


def test_hurry_cuts_patience_short(swarm: LocalSwarm) -> None:
    daemon = swarm.spawn("data", env={"SHOAL_FAKE": "stubborn"})
    swarm.wait_until(lambda: daemon.status() is not None, "an answer")
    swarm.hurry()
    # Not hurried, it would outlast the test's own time limit.
    swarm.stop(patience_s=10_000)
    assert daemon.process.returncode == -signal.SIGKILL


def test_leftovers_are_counted_and_killed(swarm: LocalSwarm) -> None:
    daemon = swarm.spawn("data", env={"SHOAL_FAKE": "litters"})
    swarm.wait_until(lambda: daemon.status() is not None, "an answer")
    swarm.stop()
    found = swarm.leftovers(grace_s=0.2)
    assert len(found) == 1
    psutil.wait_procs(found, timeout=5)
    assert swarm.leftovers() == []


def test_daemons_end_when_their_starter_is_killed(tmp_path: Path, fake: dict[str, str]) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from cli.recipe import Recipe; from node.local_swarm import LocalSwarm\n"
        f"s = LocalSwarm(Path({str(tmp_path / 's')!r}), Recipe().manifest, environment={fake!r})\n"
        "d = s.spawn('data', name='data-1')\n"
        "s.wait_until(lambda: d.status() is not None, 'an answer')\n"
        "print(d.pid, flush=True); sys.stdin.read()\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with starter:
        assert starter.stdout is not None
        daemon = psutil.Process(int(starter.stdout.readline()))
        starter.kill()
    _, alive = psutil.wait_procs([daemon], timeout=5)
    assert alive == []


def test_settings_of_the_owners_own_node_do_not_leak_in(
    swarm: LocalSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STAGE", "7")
    with LocalSwarm(swarm.root, Recipe().manifest) as another:
        assert "SHOAL_STAGE" not in another.environment
