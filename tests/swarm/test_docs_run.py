"""The commands of README and quickstart, run as they stand there."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from reference.sample import sample_documents, write_documents

ROOT = Path(__file__).parents[2]
SHOAL = (sys.executable, "-c", "from cli.main import main; main()")
SERVICES = (("swarm", "run"), ("join",))
LIMIT_S = 120.0
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


def shell_lines(page: str, heading: str) -> list[list[str]]:
    """The words of each line in the shell blocks of one chapter."""
    text = (ROOT / page).read_text()
    chapter = text.split(f"\n## {heading}", 1)[1].split("\n## ", 1)[0]
    lines = "".join(_BLOCK.findall(chapter)).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


class Terminals:
    """Follows a page: a service gets a terminal of its own, all else runs in the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._state = "first"
        for name in ("notes", "my-own-text", "books"):
            write_documents(folder / name, sample_documents())
        (folder / "book.txt").write_text("The tide came in. " * 4000)

    def type(self, words: list[str]) -> None:
        """Do what one line of the page says."""
        if words[0] == "export":
            self._state = words[1].rpartition("/")[2]
        elif words[0] == "shoal" and "cuda:0" not in words:
            words = [self._meant(word) for word in words[1:]]
            if any(tuple(words[: len(service)]) == service for service in SERVICES):
                self._serve(words)
            else:
                self.run(words)

    def run(self, words: list[str]) -> str:
        """Run a command that ends; return what it printed."""
        answer = subprocess.run(
            [*SHOAL, *words], capture_output=True, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL, cwd=self._folder, env=self._environment(),
        )  # fmt: skip
        assert answer.returncode == 0, f"{words}: {answer.stderr}"
        return answer.stdout

    def status(self) -> dict[str, object]:
        """The status of the node in the last terminal."""
        return dict(json.loads(self.run(["status", "--json"])))

    def look_from(self, state: str) -> None:
        """Go on in another terminal."""
        self._state = state

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while every service runs."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            for name, service in self._services:
                assert service.poll() is None, (self._folder / f"{name}.out").read_text()
            assert time.monotonic() < end, self.outputs()
            threading.Event().wait(0.5)

    def outputs(self) -> str:
        """What all services printed."""
        return "\n".join(f.read_text() for f in sorted(self._folder.glob("*.out")))

    def stop(self) -> None:
        """Press Ctrl-C in every terminal but that of the node that was told to leave."""
        for name, service in reversed(self._services):
            if name != self._state:
                service.send_signal(signal.SIGINT)
            assert service.wait(60) == 0, (self._folder / f"{name}.out").read_text()

    def kill(self) -> None:
        """End what a failed test left."""
        for _, service in self._services:
            service.kill()
            service.wait()

    def _serve(self, words: list[str]) -> None:
        if any(name == self._state for name, _ in self._services):
            self._state += "-next"
        output = self._folder / f"{self._state}.out"
        with output.open("wb") as file:
            service = subprocess.Popen(
                [*SHOAL, *words], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                cwd=self._folder, env=self._environment(),
            )  # fmt: skip
        self._services.append((self._state, service))
        self.wait_until(lambda: b"shoal join shoal1:" in output.read_bytes() or "join" in words)

    def _meant(self, word: str) -> str:
        if word == "INVITE":
            invite = re.search(r"shoal1:\S+", self.outputs())
            assert invite is not None
            return invite[0]
        return word.replace("~", str(self._folder))

    def _environment(self) -> dict[str, str]:
        state = str(self._folder / self._state)
        return {**os.environ, "SHOAL_STATE": state, "OMP_NUM_THREADS": "1"}


@contextmanager
def terminals(folder: Path) -> Iterator[Terminals]:
    """Terminals that leave nothing running."""
    subject = Terminals(folder)
    try:
        yield subject
    finally:
        subject.kill()


@pytest.mark.timeout(400)
def test_the_quickstart_by_hand(tmp_path: Path) -> None:
    lines = shell_lines("docs/quickstart.md", "By hand")
    looking = lines.index(["shoal", "status"])
    with terminals(tmp_path) as page:
        for words in lines[:looking]:
            page.type(words)
        page.type(["shoal", "join", "INVITE", "--stage", "3"])  # the third that it speaks of
        page.look_from("organiser")
        page.wait_until(lambda: int(str(page.status()["step"])) >= 1)
        page.look_from("volunteer-1")
        for words in lines[looking:]:
            page.type(words)
        page.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demos_of_the_pages(tmp_path: Path) -> None:
    lines = shell_lines("docs/quickstart.md", "The demo") + shell_lines("README.md", "Two commands")
    demos = [words for words in lines if words[:1] and words[0].endswith("shoal")]
    assert len(demos) >= 5
    with terminals(tmp_path) as page:
        for _, *words in demos:
            short = [
                w.replace("/tmp/", f"{tmp_path}/").replace("~/", f"{tmp_path}/") for w in words
            ]
            page.run([*short, "--steps", "2", "--width", "32"])
