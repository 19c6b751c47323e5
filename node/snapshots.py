"""Snapshots on files: one per state, named by stage, step and digest, whole or not there.

    snapshots/stage-1-step-12-<digest>.safetensors  a state that the swarm decided on
    snapshots/stage-1-step-13-<digest>.prepared     one that it may decide on yet
    snapshots/....new                               being written
    snapshots/....damaged                           set aside; the last one is kept for a look at it

A file holds the canonical bytes of the state, so its SHA-256 is the digest in its name.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
import trio

from node.journal import sync_directory
from protocol.core.snapshots import to_keep
from protocol.errors import ResourceError, StateMismatch
from protocol.ports import StateView, Tensor

PIECE_BYTES = 4 * 2**20
_DECIDED, _PREPARED, _DRAFT, _DAMAGED = ".safetensors", ".prepared", ".new", ".damaged"
_NAME = re.compile(r"stage-(\d{1,4})-step-(\d{1,16})-([0-9a-f]{64})(\.safetensors|\.prepared)")


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    stage: int
    step: int
    digest: str
    num_bytes: int

    @property
    def is_decided(self) -> bool:
        return self.path.suffix == _DECIDED


class FileSnapshots:
    """Implements Snapshots in ``folder``: the last decided state of a stage, and more.

    Of those at every ``every`` steps it keeps the last ``num_kept``. All files together take at
    most ``quota_bytes``, if that is given. What lies there is in the order of its writing.
    Two threads never work in it at once, and no other process does: the daemon holds the lock of
    its state directory.
    """

    def __init__(
        self, folder: Path, num_kept: int, quota_bytes: int | None = None, *, every: int = 1
    ) -> None:
        self._folder, self._num_kept, self._every = folder, num_kept, every
        self._quota_bytes = quota_bytes
        self._limiter = trio.CapacityLimiter(1)
        self._bad: set[str] = set()
        self._files: dict[str, _File] = {}
        for path in self._found():
            self._note(path)
            if path.suffix == _DRAFT:  # a write that was cut off
                with suppress(OSError):
                    path.unlink()

    def _found(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir(), key=_written)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ResourceError(
                f"cannot read {self._folder}: {error.strerror}",
                "Make the state directory readable.",
            ) from error

    def _note(self, path: Path) -> None:
        """Remember a file, unless its name is not ours."""
        if match := _NAME.fullmatch(path.name):
            stage, step, digest = int(match[1]), int(match[2]), match[3]
            self._files.pop(digest, None)
            self._files[digest] = _File(path, stage, step, digest, path.stat().st_size)

    # --- the port --------------------------------------------------------------------------

    def holds(self, digest: str) -> bool:
        """Whether a usable snapshot has this digest."""
        return digest in self._files and digest not in self._bad

    def is_decided(self, digest: str) -> bool:
        """Whether it is there and known to be decided."""
        return self.holds(digest) and self._files[digest].is_decided

    def decided(self, stage: int) -> list[tuple[int, str]]:
        """Step and digest of the decided states of a stage; what was written last comes first."""
        files = list(self._files.values())[::-1]
        return [(f.step, f.digest) for f in files if f.stage == stage and self.is_decided(f.digest)]

    async def load(self, digest: str) -> Tensor | None:
        """Read a whole file, or None; ResourceError if it cannot be read."""
        if not self.holds(digest):
            return None
        path = self._files[digest].path
        return await trio.to_thread.run_sync(_read, path, limiter=self._limiter)

    async def save(self, stage: int, view: StateView, *, is_decided: bool) -> None:
        """Write a file whole or not at all, then remove what is too old."""
        await trio.to_thread.run_sync(self._save, stage, view, is_decided, limiter=self._limiter)

    async def decide(self, digest: str) -> None:
        """Rename a prepared state's file."""
        await trio.to_thread.run_sync(self._decide, digest, limiter=self._limiter)

    async def set_aside(self, digest: str) -> None:
        """Rename the file, so that it can be looked at; it does not count any more even if not."""
        self._bad.add(digest)
        await trio.to_thread.run_sync(self._set_aside, digest, limiter=self._limiter)

    # --- in a thread -----------------------------------------------------------------------

    def _save(self, stage: int, view: StateView, is_decided: bool) -> None:
        step, digest, pieces = view
        suffix = _DECIDED if is_decided else _PREPARED
        path = self._folder / f"stage-{stage}-step-{step}-{digest}{suffix}"
        self._make_room(stage, sum(piece.nbytes for piece in pieces))
        draft = path.with_suffix(_DRAFT)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            _write(draft, pieces, digest)
            draft.replace(path)
            sync_directory(self._folder)
        except OSError as error:
            raise ResourceError(
                f"cannot write a snapshot to {self._folder}: {error.strerror}",
                "Free disk space or make the directory writable; training goes on meanwhile.",
            ) from error
        finally:
            with suppress(OSError):
                draft.unlink()
        self._bad.discard(digest)
        self._note(path)
        self._prune(stage)

    def _make_room(self, stage: int, num_bytes: int) -> None:
        """Remove all but the newest decided state if the quota asks for it."""
        if self._quota_bytes is None:
            return
        for file in self._old(stage, num_kept=0):
            if self._used() + num_bytes > self._quota_bytes:
                self._remove(file)
        if self._used() + num_bytes > self._quota_bytes:
            raise ResourceError(
                f"a snapshot of {num_bytes} bytes beside {self._used()} would exceed"
                f" snapshot_quota_bytes, {self._quota_bytes}",
                "Raise snapshot_quota_bytes to twice the size of the state; training goes on.",
            )

    def _used(self) -> int:
        return sum(file.num_bytes for file in self._files.values())

    def _decide(self, digest: str) -> None:
        file = self._files.get(digest)
        if file is None or file.is_decided:
            return
        path = file.path.with_suffix(_DECIDED)
        try:
            file.path.replace(path)
            sync_directory(self._folder)
        except OSError as error:
            raise ResourceError(
                f"cannot rename {file.path}: {error.strerror}", "Make the directory writable."
            ) from error
        self._note(path)
        self._prune(file.stage)

    def _prune(self, stage: int) -> None:
        for file in self._old(stage, self._num_kept):
            self._remove(file)

    def _old(self, stage: int, num_kept: int) -> list[_File]:
        """Decided states that need not be kept, and prepared ones that came to nothing."""
        mine = [file for file in self._files.values() if file.stage == stage]
        keep = to_keep(
            [(f.step, f.digest, f.is_decided) for f in mine], num_kept=num_kept, every=self._every
        )
        return [file for file in mine if file.digest not in keep]

    def _remove(self, file: _File) -> None:
        with suppress(OSError):
            file.path.unlink()
            del self._files[file.digest]

    def _set_aside(self, digest: str) -> None:
        file = self._files.pop(digest, None)
        if file is None:
            return
        with suppress(OSError):
            for old in self._folder.glob(f"*{_DAMAGED}"):
                old.unlink()
            file.path.replace(file.path.with_suffix(_DAMAGED))


def _written(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_mtime_ns, path.name
    except OSError:
        return 0, path.name


def _write(path: Path, pieces: tuple[Tensor, ...], digest: str) -> None:
    """Write and sync; StateMismatch if the numbers changed under our hands, as they may."""
    seen = sha256()
    with path.open("wb") as file:
        for piece in pieces:
            whole = piece.numpy().data
            for start in range(0, len(whole), PIECE_BYTES):
                part = bytes(whole[start : start + PIECE_BYTES])
                seen.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    if seen.hexdigest() != digest:
        raise StateMismatch(
            f"the state {digest[:12]} was gone before it was written",
            "The disk is slower than the steps: raise snapshot_steps.",
        )


def _read(path: Path) -> Tensor:
    try:
        return torch.from_numpy(np.fromfile(path, dtype=np.uint8))
    except OSError as error:
        raise ResourceError(
            f"cannot read {path}: {error.strerror}", "The state is fetched from another holder."
        ) from error
