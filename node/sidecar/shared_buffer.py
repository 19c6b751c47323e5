"""Scratch memory that the daemon and the averager's process both map."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch

from protocol.errors import ResourceError

_FLOAT_BYTES = 4
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # of this user alone: the file is 0600


class SharedBuffer:
    """An fp32 tensor in a file of memory: by name, so that a process started by exec can map it.

    The name is one that ``sweep`` knows: what a killed daemon leaves goes at the next start.
    """

    def __init__(self, num_elements: int, folder: Path | None = None) -> None:
        self.path = _make_file(num_elements * _FLOAT_BYTES, folder)
        self.tensor = torch.from_file(
            str(self.path), shared=True, size=num_elements, dtype=torch.float32
        )

    def close(self) -> None:
        """Remove the name; the memory goes with the last mapping."""
        self.path.unlink(missing_ok=True)


def _make_file(num_bytes: int, folder: Path | None) -> Path:
    """Take the memory at once: a full memory file system would kill us at a later write."""
    where = folder or _SHARED_MEMORY
    path = where / f"torch_{os.getpid()}_shoal{secrets.token_hex(8)}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _no_room(num_bytes, where) from error
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise _no_room(num_bytes, where) from error
    finally:
        os.close(descriptor)
    return path


def _no_room(num_bytes: int, where: Path) -> ResourceError:
    return ResourceError(
        f"no room for {-(-num_bytes // 2**20)} MiB of shared memory in {where}",
        f"Make {where} larger (in a container: --shm-size), or join an exactly averaging swarm.",
    )
