"""The walk of docs/quickstart.md: an organiser and a volunteer in two terminals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SHOAL = (sys.executable, "-c", "from cli.main import main; main()")
SMALL = (
    *("--stages", "1", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32"),
    *("--quota", "4", "--microbatch", "2", "--steps", "3"),
)
LIMIT_S = 120.0


class Terminal:
    """A shell with SHOAL_STATE of its own."""

    def __init__(self, state: Path) -> None:
        self.environment = {**os.environ, "SHOAL_STATE": str(state), "OMP_NUM_THREADS": "1"}

    def shoal(self, *words: str) -> str:
        """Run a command to its end; return what it printed."""
        answer = subprocess.run(
            [*SHOAL, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.environment,
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    def ask(self, *words: str) -> Any:
        """Run a command with --json; return its answer."""
        return json.loads(self.shoal(*words, "--json"))

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Run a command in the foreground of this terminal."""
        with subprocess.Popen(
            [*SHOAL, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def wait_until_done(self) -> dict[str, Any]:
        """Ask for the status until the training is over."""
        end = time.monotonic() + LIMIT_S
        while (status := self.ask("status"))["state"] != "done":
            assert time.monotonic() < end, status
            threading.Event().wait(0.5)
        return dict(status)


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> str:
    """Read the terminal up to the line that matches; return its first group."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if found := re.search(pattern, line):
            return found[1]
    pytest.fail(f"{pattern!r} is not in {seen!r}")


@pytest.mark.timeout(300)
def test_two_terminals_train_a_model(tmp_path: Path) -> None:
    first, second = Terminal(tmp_path / "organiser"), Terminal(tmp_path / "volunteer")
    swarm = first.ask("swarm", "create", str(tmp_path / "manifest.toml"), *SMALL)["swarm"]
    with first.running("swarm", "run") as organiser:
        invite = wait_for_line(organiser, r"shoal join (shoal1:\S+)")
        with second.running("join", invite, "--threads", "1") as volunteer:
            wait_for_line(volunteer, r"(waiting|training|done|alone): stage 1")
            status = second.wait_until_done()
            check_volunteer(status, swarm)
            check_views(first, second, status["peer_id"])
            assert second.shoal("leave") == "left\n"
            assert volunteer.wait(30) == 0
        organiser.send_signal(signal.SIGINT)
        assert organiser.wait(60) == 0
    for name in ("organiser", "volunteer"):
        assert list((tmp_path / name / "weights").glob("*.safetensors"))


def check_volunteer(status: dict[str, Any], swarm: str) -> None:
    """The questions that `status` must answer."""
    assert status["swarm"] == swarm
    assert (status["role"], status["stage"], status["step"]) == ("volunteer", 1, 3)
    assert status["committed_total"] == status["committed_last_hour"] == 12
    assert status["bytes_in"] > 0
    assert status["bytes_out"] > 0


def check_views(first: Terminal, second: Terminal, volunteer: str) -> None:
    """Each sees the other, and the settings in force name their origins."""
    assert volunteer in {peer["peer_id"] for peer in first.ask("peers")}
    assert volunteer[-6:] in first.shoal("peers")  # the table shortens what is long
    assert second.ask("identity", "show")["peer_id"] == volunteer
    origins = {row["name"]: row["origin"] for row in second.ask("config", "show", "--origin")}
    assert origins["invite"].endswith("config.toml")
    assert origins["device"] == "default"
    assert f"node                  {volunteer}" in second.shoal("status")
