"""The commands as a person types them, against a fake daemon: no terminal, stdin closed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fake_daemon import fake_path

from cli.main import run
from node.config import load_config
from node.identity import sole_use
from node.paths import StatePaths
from protocol.invite import Invite
from protocol.keys import NodeKey
from protocol.manifest import SignedManifest

SHOAL = (sys.executable, "-c", "from cli.main import main; main()")
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/" + NodeKey(b"s" * 32).peer_id


@dataclass(frozen=True)
class Answer:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str


class Shoal:
    """Runs `shoal` with a state directory of its own and the fake daemon."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.state = folder / "state"
        self.set = monkeypatch.setenv
        self._capfd = capfd
        self.set("PYTHONPATH", fake_path(folder))
        self.set("SHOAL_STATE", str(self.state))

    def __call__(self, *words: str) -> Answer:
        """Run a command to its end, in this process: starting Python for each takes too long."""
        self._capfd.readouterr()
        status = run(list(words))
        told = self._capfd.readouterr()
        return Answer(status, told.out, told.err)

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the background; kill it if the test fails."""
        with subprocess.Popen(
            [*SHOAL, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


@pytest.fixture
def shoal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Shoal:
    return Shoal(tmp_path, monkeypatch, capfd)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the output up to a line with ``text``; fail if it ends before."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"{text!r} is not in {seen!r}")


def daemons(starter: int) -> Sequence[psutil.Process]:
    return psutil.Process(starter).children()


def create(shoal: Shoal, folder: Path) -> Path:
    file = folder / "manifest.toml"
    answer = shoal("swarm", "create", str(file), "--width", "64", "--json")
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["manifest"] == str(file)
    return file


def test_create_writes_signs_and_says_what_next(shoal: Shoal, tmp_path: Path) -> None:
    answer = shoal("swarm", "create", str(tmp_path / "m.toml"), "--name", "tiny")
    assert answer.returncode == 0
    manifest = SignedManifest.from_toml((tmp_path / "m.toml").read_text()).verify()
    assert manifest.name == "tiny"
    assert manifest.swarm_id in answer.stdout
    assert "back it up" in answer.stderr
    assert "shoal swarm run" in answer.stderr
    assert (shoal.state / "manifest.toml").read_text() == (tmp_path / "m.toml").read_text()


def test_create_signs_an_edited_file(shoal: Shoal, tmp_path: Path) -> None:
    file = create(shoal, tmp_path)
    file.write_text(file.read_text().replace("steps = 60", "steps = 61"))
    assert shoal("swarm", "create", str(file)).returncode == 0
    assert SignedManifest.from_toml(file.read_text()).verify().training.steps == 61


def test_create_does_not_ignore_options(shoal: Shoal, tmp_path: Path) -> None:
    file = create(shoal, tmp_path)
    answer = shoal("swarm", "create", str(file), "--width", "32")
    assert answer.returncode == 2
    assert "exists, so --width has no effect" in answer.stderr


def test_create_spares_the_training_of_another_swarm(shoal: Shoal, tmp_path: Path) -> None:
    create(shoal, tmp_path)
    (shoal.state / "steps.jsonl").touch()
    answer = shoal("swarm", "create", str(tmp_path / "other.toml"), "--steps", "9")
    assert answer.returncode == 2
    assert "holds the training of another swarm" in answer.stderr
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize("words", [["--width", "63"], ["--stages", "0"]])
def test_create_that_fails_leaves_nothing(shoal: Shoal, tmp_path: Path, words: list[str]) -> None:
    answer = shoal("swarm", "create", str(tmp_path / "m.toml"), *words)
    assert answer.returncode == 2
    assert "new identity" not in answer.stderr
    assert not shoal.state.exists()
    assert not (tmp_path / "m.toml").exists()


def test_create_that_cannot_write_leaves_nothing(shoal: Shoal, tmp_path: Path) -> None:
    """Whichever of the three files cannot be written: the one named, the key, the node's own."""
    answer = shoal("swarm", "create", str(tmp_path / "nowhere" / "m.toml"))
    assert answer.returncode == 6
    assert not shoal.state.exists()
    shoal.state.mkdir()
    (shoal.state / "manifest.toml.new").mkdir()  # in the way
    answer = shoal("swarm", "create", str(tmp_path / "m.toml"))
    assert answer.returncode == 6
    assert not (tmp_path / "m.toml").exists()
    assert [path.name for path in shoal.state.iterdir()] == ["manifest.toml.new"]


@pytest.mark.parametrize(
    "words", [["swarm", "run"], ["swarm", "create", "x.toml"], ["join"], ["join", "--threads", "9"]]
)
def test_a_directory_in_use_is_refused_before_anything_changes(
    shoal: Shoal, tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one would see the other daemon's status, and leave settings behind for it."""
    monkeypatch.chdir(tmp_path)
    create(shoal, tmp_path)
    before = {path: path.read_bytes() for path in shoal.state.iterdir()}
    with sole_use(StatePaths(shoal.state)):
        answer = shoal(*words)
    assert answer.returncode == 5
    assert answer.stdout == ""
    assert answer.stderr.startswith(
        f"error[identity]: another shoal daemon (process {os.getpid()})"
    )
    (shoal.state / "daemon.lock").unlink()
    assert {path: path.read_bytes() for path in shoal.state.iterdir()} == before
    assert not (tmp_path / "x.toml").exists()


def test_a_mistyped_variable_is_told_and_what_was_meant(shoal: Shoal) -> None:
    shoal.set("SHOAL_THREDS", "2")
    told = shoal("config", "show").stderr
    assert told == (
        "warning: the variable SHOAL_THREDS is no setting and is ignored;"
        " did you mean SHOAL_THREADS?\n"
    )


def test_run_names_a_manifest_that_was_destroyed(shoal: Shoal, tmp_path: Path) -> None:
    create(shoal, tmp_path)
    (shoal.state / "manifest.toml").write_bytes(b"\x00\xff")
    answer = shoal("swarm", "run")
    assert answer.returncode == 2
    assert "the manifest is not TOML" in answer.stderr


def test_run_needs_a_swarm(shoal: Shoal) -> None:
    answer = shoal("swarm", "run")
    assert answer.returncode == 2
    assert "remedy: Create one: `shoal swarm create manifest.toml`." in answer.stderr


def test_run_prints_the_invite_and_ends_cleanly(shoal: Shoal, tmp_path: Path) -> None:
    file = create(shoal, tmp_path)
    with shoal.running("swarm", "run", str(file), "--data", str(file)) as organiser:
        assert "  shoal join shoal1:fake\n" in read_until(organiser, "shoal join")
        read_until(organiser, "starting: no stage yet")
        children = daemons(organiser.pid)
        status = json.loads(shoal("status", "--json").stdout)
        assert status["committed_total"] == 1
        told = shoal("status").stdout
        assert "committed, in total   1 microbatches" in told
        assert "\nloss " not in told
        assert "\nspeed " not in told
        (shoal.state / "totals.json").write_text('{"microbatches": 7, "steps": 2}')
        organiser.send_signal(signal.SIGINT)
        told = read_until(organiser, "left cleanly")
        assert "7 microbatches of this run count, in 2 steps; 7 of all runs" in told
        assert organiser.wait(30) == 0
    assert psutil.wait_procs(children, timeout=5)[1] == []
    config = load_config(shoal.state / "config.toml").config
    assert (config.role, config.data) == ("organiser", (file,))


def test_killing_the_command_ends_its_daemon(shoal: Shoal, tmp_path: Path) -> None:
    create(shoal, tmp_path)
    with shoal.running("swarm", "run") as organiser:
        read_until(organiser, "shoal join")
        children = daemons(organiser.pid)
        assert len(children) == 1
        organiser.kill()
    assert psutil.wait_procs(children, timeout=5)[1] == []


def test_a_daemons_own_error_and_status_come_through(shoal: Shoal, tmp_path: Path) -> None:
    create(shoal, tmp_path)
    shoal.set("SHOAL_FAKE", "dies")
    answer = shoal("swarm", "run")
    assert answer.returncode == 6
    assert "error[resource]: no memory" in answer.stderr
    assert "the node ended with status 6; its log is" in answer.stderr


def test_settings_that_were_a_mistake_are_forgotten(shoal: Shoal) -> None:
    shoal.set("SHOAL_FAKE", "dies")
    assert shoal("join", invite("a" * 64), "--memory", "1MiB").returncode == 6
    assert load_config(shoal.state / "config.toml").config.memory_bytes is None


def invite(swarm: str) -> str:
    organiser = NodeKey(b"o" * 32).peer_id
    return Invite(swarm_id=swarm, organiser=organiser, seeds=(ADDRESS,)).encode()


def test_join_remembers_its_settings(shoal: Shoal) -> None:
    text = invite("a" * 64)
    limits = ("--stage", "2", "--threads", "3", "--memory", "2GiB", "--metrics-port", "9464")
    with shoal.running("join", text, *limits, "--json") as volunteer:
        line = read_until(volunteer, '"event": "state"').splitlines()[-1]
        assert json.loads(line)["state"] == "starting"
        volunteer.send_signal(signal.SIGTERM)
        assert volunteer.wait(30) == 0
    config = load_config(shoal.state / "config.toml").config
    assert (config.invite, config.stage, config.threads) == (text, 2, 3)
    assert (config.memory_bytes, config.metrics_port) == (2 * 2**30, 9464)
    with shoal.running("join") as volunteer:
        read_until(volunteer, "joining as volunteer")
        read_until(volunteer, "starting: no stage yet")
        volunteer.send_signal(signal.SIGTERM)
        assert volunteer.wait(30) == 0


def test_the_invite_may_come_from_a_file(shoal: Shoal, tmp_path: Path) -> None:
    """As in a container: nobody types it, and who starts too early is told what to wait for."""
    file = tmp_path / "invite"
    shoal.set("SHOAL_INVITE_FILE", str(file))
    early = shoal("join")
    assert early.returncode == 2
    assert f"there is no invite in {file}" in early.stderr
    file.write_text(invite("a" * 64) + "\n")
    with shoal.running("join") as volunteer:
        read_until(volunteer, "starting: no stage yet")
        volunteer.send_signal(signal.SIGTERM)
        assert volunteer.wait(30) == 0
    assert load_config(shoal.state / "config.toml").config.invite == invite("a" * 64)


def test_a_flag_overrules_the_environment_of_the_daemon_too(shoal: Shoal) -> None:
    shoal.set("SHOAL_THREADS", "1")
    shoal.set("SHOAL_DHT_PORT", "4002")
    with shoal.running("join", invite("a" * 64), "--threads", "3") as volunteer:
        read_until(volunteer, "starting: no stage yet")
        (daemon,) = psutil.Process(volunteer.pid).children()
        seen = {n: v for n, v in daemon.environ().items() if n.startswith("SHOAL_")}
        volunteer.send_signal(signal.SIGTERM)
        assert volunteer.wait(30) == 0
    assert "SHOAL_THREADS" not in seen
    assert seen["SHOAL_DHT_PORT"] == "4002"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["join"], "has joined no swarm yet"),
        (["join", "nonsense"], "this is not an invite"),
        (["join", invite("a" * 64), "--memory", "much"], "memory_bytes"),
        (["join", invite("a" * 64), "--role", "data", "--stage", "1"], "leave stage unset"),
        (["swarm", "run", "/nowhere.toml"], "cannot read /nowhere.toml"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    shoal: Shoal, words: list[str], cause: str
) -> None:
    answer = shoal(*words)
    assert answer.returncode == 2
    assert cause in answer.stderr
    assert "remedy: " in answer.stderr
    assert "fake daemon started" not in answer.stderr


def test_join_keeps_swarms_apart(shoal: Shoal, tmp_path: Path) -> None:
    create(shoal, tmp_path)
    answer = shoal("join", invite("a" * 64))
    assert answer.returncode == 2
    assert "belongs to swarm" in answer.stderr


def test_identity_and_config_need_no_daemon(shoal: Shoal, tmp_path: Path) -> None:
    assert shoal("identity", "show").returncode == 5
    create(shoal, tmp_path)
    known = json.loads(shoal("identity", "show", "--json").stdout)
    organiser = SignedManifest.from_toml((shoal.state / "manifest.toml").read_text())
    assert known["peer_id"] == organiser.manifest.organiser
    shoal.set("SHOAL_THREADS", "2")
    rows = json.loads(shoal("config", "show", "--origin", "--json").stdout)
    threads = next(row for row in rows if row["name"] == "threads")
    assert threads == {"name": "threads", "value": 2, "origin": "SHOAL_THREADS"}
    assert "SHOAL_THREADS" in shoal("config", "show", "--origin").stdout
    assert "SHOAL_THREADS" not in shoal("config", "show").stdout


def test_demo_shows_why_a_node_died(shoal: Shoal, tmp_path: Path) -> None:
    # The demo keeps SHOAL_* of the owner's node away from its own nodes: this fake has no state.
    broken = tmp_path / "fake" / "node" / "main.py"
    broken.unlink()
    broken.write_text("import sys; print('error[resource]: no memory'); sys.exit(6)\n")
    answer = shoal("demo", "--keep", str(tmp_path / "d"), "--json")
    assert answer.returncode == 6
    assert answer.stdout == ""
    assert "data-1: error[resource]: no memory" in answer.stderr
    assert "error[resource]: data-1 ended with status 6" in answer.stderr


def test_demo_ends_with_the_mistake_that_a_node_found(shoal: Shoal, tmp_path: Path) -> None:
    broken = tmp_path / "fake" / "node" / "main.py"
    broken.unlink()
    broken.write_text("import sys; print('error[config]: no text\\nremedy: Add it'); sys.exit(2)\n")
    answer = shoal("demo", "--keep", str(tmp_path / "d"))
    assert answer.returncode == 2
    assert answer.stderr.endswith("error[config]: data-1: no text\nremedy: Add it\n")
    assert "ended with status" not in answer.stderr


def test_demo_ends_cleanly_when_interrupted_at_its_start(shoal: Shoal, tmp_path: Path) -> None:
    with shoal.running("demo", "--keep", str(tmp_path / "d")) as demo:
        read_until(demo, "starting 6 more nodes")
        deadline = time.monotonic() + 30
        while not (children := daemons(demo.pid)) and time.monotonic() < deadline:
            pass
        demo.send_signal(signal.SIGINT)
        assert demo.stdout is not None
        told = demo.stdout.read()
        assert demo.wait(30) == 130
    assert "0 of 60 steps were done" in told
    assert "weights: none were written yet" in told
    assert "Traceback" not in told
    assert psutil.wait_procs(children, timeout=5)[1] == []
