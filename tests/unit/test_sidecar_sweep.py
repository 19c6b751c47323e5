"""Only what dead processes of ours left is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.sidecar.sweep import make_folder, sweep


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_sweep(tmp_path: Path, dead_pid: int) -> None:
    temporary, memory = tmp_path / "tmp", tmp_path / "shm"
    dead = [temporary / f"shoal-sidecar-{dead_pid}-abc", memory / f"torch_{dead_pid}_12_34"]
    kept = [
        temporary / f"shoal-sidecar-{os.getpid()}-abc",
        temporary / f"shoal-other-{dead_pid}-abc",
        memory / f"torch_{os.getpid()}_12_34",
        memory / f"other_{dead_pid}_1",
    ]
    for path in (dead[0], *kept[:2]):
        path.mkdir(parents=True)
        (path / "p2pd.sock").touch()
    memory.mkdir()
    for path in (dead[1], *kept[2:]):
        path.touch()
    assert set(sweep(temporary, memory)) == set(dead)
    assert not any(path.exists() for path in dead)
    assert all(path.exists() for path in kept)


def test_missing_folders_are_nothing_to_sweep(tmp_path: Path) -> None:
    assert sweep(tmp_path / "no", tmp_path / "neither") == []


@pytest.mark.parametrize("depth", [0, 12])
def test_folder_is_private_and_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """A unix socket's path is limited, however deep the temporary folder lies."""
    base = tmp_path.joinpath(*["deep" * 3] * depth)
    base.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr("tempfile.tempdir", str(base))
    folder = Path(make_folder())
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) + len("/p2pclient-12345678901.sock") < 108
    finally:
        folder.rmdir()
