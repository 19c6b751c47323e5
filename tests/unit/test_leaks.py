"""The check for leaks sees what it is there for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import leaks
import psutil
import pytest

SLEEP = "import time; time.sleep(60)"
# A parent that starts a sleeping child, prints its process id, and dies.
ORPHANING = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], stdout=subprocess.DEVNULL)\n"
    "print(child.pid)"
)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_S", 0.05)


@pytest.mark.usefixtures("short_grace")
def test_child_is_found_and_ended() -> None:
    before = leaks.our_processes("MARK=none")
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    found = leaks.end_new_processes(before, "MARK=none")
    assert [str(child.pid) in text for text in found] == [True]
    child.wait(timeout=10)  # it would sleep for a minute
    assert not psutil.pid_exists(child.pid)


@pytest.mark.usefixtures("short_grace")
def test_orphan_is_found_by_its_mark() -> None:
    """Its parent is dead, so that only the environment tells that it is ours."""
    mark = f"LEAK_TEST=orphan-{os.getpid()}"
    before = leaks.our_processes(mark)
    environment = {**os.environ, "LEAK_TEST": mark.partition("=")[2]}
    command = [sys.executable, "-c", ORPHANING]
    parent = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=True, timeout=30
    )
    orphan = int(parent.stdout)
    found = leaks.end_new_processes(before, mark)
    assert [str(orphan) in text for text in found] == [True]
    assert leaks.end_new_processes(before, mark) == []


def test_process_that_ends_by_itself_is_no_leak() -> None:
    before = leaks.our_processes("MARK=none")
    with subprocess.Popen([sys.executable, "-c", "pass"]):
        assert leaks.end_new_processes(before, "MARK=none") == []


@pytest.mark.usefixtures("short_grace")
def test_thread_is_found() -> None:
    before, end = leaks.threads(), threading.Event()
    thread = threading.Thread(target=end.wait, name="left-behind")
    thread.start()
    assert leaks.new_threads(before) == ["thread left-behind"]
    end.set()
    thread.join()
    assert leaks.new_threads(before) == []


def test_socket_and_file_are_found(tmp_path: Path) -> None:
    before = leaks.open_files()
    with socket.socket() as sock, (tmp_path / "f").open("w") as file:
        found = leaks.new_files(before)
        assert any("socket:" in text and f" {sock.fileno()} " in text for text in found)
        assert any(file.name in text for text in found)
    assert leaks.new_files(before) == []
