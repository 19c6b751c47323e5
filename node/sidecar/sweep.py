"""Private folders of side-cars, and removing those that dead processes left behind."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_FOLDER = re.compile(r"shoal-sidecar-(\d+)-\w+")
_SHARED_MEMORY = re.compile(r"torch_(\d+)_\w+")
# A unix socket's path has at most 107 bytes, of which p2pd's file names need about 30.
_MAX_FOLDER_PATH = 70


def make_folder() -> str:
    """Make the private folder (0700) of one side-car: its key while starting, its sockets."""
    base = tempfile.gettempdir()
    prefix = f"shoal-sidecar-{os.getpid()}-"
    if len(base) + len(prefix) + 9 > _MAX_FOLDER_PATH:
        base = "/tmp"  # noqa: S108  # short, and mkdtemp makes it ours
    return tempfile.mkdtemp(prefix=prefix, dir=base)


def sweep(temporary: Path | None = None, shared_memory: Path = Path("/dev/shm")) -> list[Path]:  # noqa: S108
    """Remove what dead processes of this user left; return what was removed."""
    left = leftovers(temporary, shared_memory)
    for path in left:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def leftovers(
    temporary: Path | None = None,
    shared_memory: Path = Path("/dev/shm"),  # noqa: S108
) -> list[Path]:
    """Return what dead processes of this user left.

    SIGKILL leaves a side-car's folder and torch's shared memory, which can be hundreds of MB.
    """
    folders = {temporary} if temporary else {Path(tempfile.gettempdir()), Path("/tmp")}  # noqa: S108
    left = [path for folder in sorted(folders) for path in _left_by_dead(folder, _FOLDER)]
    return [*left, *_left_by_dead(shared_memory, _SHARED_MEMORY)]


def _left_by_dead(folder: Path, pattern: re.Pattern[str]) -> Iterator[Path]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        with suppress(OSError):
            if match and path.lstat().st_uid == os.getuid() and not _is_alive(int(match[1])):
                yield path


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
