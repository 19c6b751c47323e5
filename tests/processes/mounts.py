"""Small file systems for tests of full and read-only disks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path) -> Iterator[None]:
    """A file system of 256 KiB on ``folder``; skip where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "shoal-test", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def make_read_only(folder: Path) -> None:
    """Let nobody write into a mounted file system any more."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, capture_output=True)


def fill(folder: Path) -> None:
    """Leave no room."""
    with (folder / "full").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
