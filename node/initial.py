"""Imported weights on disk, one file per stage, for those who begin with them."""

from __future__ import annotations

from pathlib import Path

import torch
import trio

from protocol.core.transfer import CHUNK_BYTES
from protocol.ports import Tensor


def initial_file(folder: Path, stage: int) -> Path:
    """Return the path of a stage's weights."""
    return folder / f"stage-{stage:04d}.safetensors"


class FileInitialWeights:
    """Implements InitialWeights in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def chunk(self, stage: int, number: int) -> tuple[int, Tensor] | None:
        """Read one chunk; None if the file is not there, or has no such chunk."""
        return await trio.to_thread.run_sync(self._read, stage, number)

    def _read(self, stage: int, number: int) -> tuple[int, Tensor] | None:
        try:
            with initial_file(self._folder, stage).open("rb") as file:
                size = file.seek(0, 2)
                file.seek(number * CHUNK_BYTES)
                data = file.read(CHUNK_BYTES)
        except OSError:
            return None
        if not data:
            return None
        return -(-size // CHUNK_BYTES), torch.frombuffer(bytearray(data), dtype=torch.uint8)
