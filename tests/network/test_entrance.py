"""Joining from another computer: the seed is silent, the key runs twice, the clock is off."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from link import LEFT, RIGHT, Link, linked

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("--stages", "1", "--layers", "2", "--width", "32", "--heads", "2", "--context", "32"),
    *("--quota", "4", "--microbatch", "2", "--steps", "2000"),
)
SHOAL = "from cli.main import main; main()"
LATE = "import time; real = time.time; time.time = lambda: real() - 3600\n"
DAEMON = "import sys; from node.main import main; sys.exit(main())"
START_S = 90.0


@dataclass
class Terminal:
    """A process in one of the namespaces and what it has said."""

    process: subprocess.Popen[str]
    said: str = ""
    _more: threading.Condition = field(default_factory=threading.Condition)

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self.said += line
                self._more.notify_all()

    def hear(self, text: str, times: int = 1, limit_s: float = START_S) -> None:
        """Wait until ``text`` was said so many times."""
        with self._more:
            heard = self._more.wait_for(lambda: self.said.count(text) >= times, limit_s)
        assert heard, f"{text!r} is not in {self.said!r}"

    def end(self, limit_s: float = START_S) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(limit_s)


class Computers:
    """The organiser runs in the left namespace; tests start what they like in both."""

    def __init__(self, link: Link, folder: Path, stack: ExitStack) -> None:
        self.link, self.folder, self.stack = link, folder, stack
        self.organiser = folder / "organiser"
        created = ("swarm", "create", str(folder / "m.toml"), "--state", str(self.organiser))
        subprocess.run(
            [sys.executable, "-c", SHOAL, *created, *SMALL],
            check=True,
            capture_output=True,
            cwd=ROOT,
        )
        node = stack.enter_context(self.running("left", SHOAL, "swarm", "run", at=self.organiser))
        node.hear("shoal join shoal1:")
        self.invite = (self.organiser / "invite").read_text().strip()

    def volunteer(self, name: str, key_of: str | None = None) -> Path:
        """Return a state directory, with the key of another one if asked."""
        state = self.folder / name
        state.mkdir(mode=0o700)
        if key_of:
            shutil.copy2(self.folder / key_of / "key", state / "key")
        return state

    @contextmanager
    def running(self, side: str, code: str, *words: str, at: Path) -> Iterator[Terminal]:
        """Run Python code in a namespace."""
        namespace, host = (self.link.left, LEFT) if side == "left" else (self.link.right, RIGHT)
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "SHOAL_LISTEN_HOST": host,
            "SHOAL_DEADLINES_SCALE": "0.5",
            "OMP_NUM_THREADS": "1",
        }
        command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, *words]
        with subprocess.Popen(
            [*command, "--state", str(at)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as process:
            terminal = Terminal(process)
            reader = threading.Thread(target=terminal.listen)
            reader.start()
            try:
                yield terminal
            finally:
                process.kill()
                reader.join()


@pytest.fixture(scope="module")
def computers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Computers]:
    with ExitStack() as stack:
        link = stack.enter_context(linked())
        yield Computers(link, tmp_path_factory.mktemp("entrance"), stack)


@pytest.mark.slow
def test_a_silent_seed_is_named_and_tried_again(computers: Computers) -> None:
    """Packets are lost without a word, as behind a firewall."""
    computers.link.cut()
    join = ("join", computers.invite)
    state = computers.volunteer("alone")
    try:
        with computers.running("right", SHOAL, *join, "--no-retry", at=state) as once:
            assert once.end() == 4
        assert "error[unreachable]: no seed of the swarm answered (/ip4/" in once.said
        with computers.running("right", SHOAL, *join, at=state) as patient:
            patient.hear("next try in", times=2)
            assert LEFT in patient.said
            assert "tried for" in patient.said
            computers.link.heal()
            patient.hear("stage 1")
    finally:
        computers.link.heal()
    assert "Traceback" not in once.said + patient.said


@pytest.mark.slow
def test_the_same_key_on_another_computer_is_refused(computers: Computers) -> None:
    first = computers.volunteer("first")
    join = ("join", computers.invite)
    with computers.running("left", SHOAL, *join, at=first) as one:
        one.hear("stage 1")
        second = computers.volunteer("second", key_of="first")
        began = time.monotonic()
        with computers.running("right", SHOAL, *join, at=second) as two:
            assert two.end() == 5
        print(f"refused {time.monotonic() - began:.1f} s after its start")
        told = "error[identity]: another node runs with this node's key at /ip4/"
        assert told + LEFT in two.said
        third = computers.volunteer("third", key_of="first")
        with computers.running("left", SHOAL, *join, at=third) as here:
            assert here.end() == 5
        assert f", {first}) runs with this key" in here.said
        assert one.process.poll() is None
    assert "Traceback" not in two.said + here.said


def test_the_organisers_key_on_another_computer_is_refused(computers: Computers) -> None:
    state = computers.volunteer("impostor", key_of="organiser")
    with computers.running("right", SHOAL, "join", computers.invite, at=state) as impostor:
        assert impostor.end() == 5
    told = "error[identity]: another node runs with this node's key at /ip4/"
    assert told + LEFT in impostor.said


def test_a_clock_that_is_off_is_told(computers: Computers) -> None:
    state = computers.volunteer("late")
    (state / "config.toml").write_text(f'invite = "{computers.invite}"\n')
    with computers.running("right", LATE + DAEMON, at=state) as late:
        assert late.end() == 9
    told = "error[clock]: this computer's clock is 3600 s behind the organiser's"
    assert told in late.said
    assert "Traceback" not in late.said
