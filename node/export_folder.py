"""The owner's side of an export: the folder that ``transformers`` loads, whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from node.client import ControlClient
from node.status import ExportLine
from protocol.errors import ConfigError, ResourceError, Unreachable
from protocol.manifest import Manifest
from stages.hf_folder import (
    StageFile,
    stage_file_name,
    state_bytes,
    write_config,
    write_index,
    write_tokenizer,
)

_SPARE_BYTES = 2**20  # headers, index, tokenizer


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the model at ``step``."""

    folder: Path
    step: int
    num_stages: int
    num_parameters: int


# Told with a stage, the bytes of its state that came so far, and about how many there will be.
Progress = Callable[[int, int, int], None]


def export_model(client: ControlClient, folder: Path, progress: Progress) -> Exported:
    """Write the running swarm's model into ``folder``, which must not hold anything yet.

    Raises ConfigError, NotAllowed, ResourceError or Unreachable; then nothing is left behind.
    """
    folder = folder.absolute()
    _refuse_taken(folder)
    with _explained(folder), _draft_of(folder) as draft:
        return _write(client.export(), draft, folder, progress)


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already", "Name a directory that is not there.")


@contextmanager
def _draft_of(folder: Path) -> Iterator[Path]:
    """Make a hidden directory beside ``folder`` that takes its place at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    draft.mkdir()
    try:
        yield draft
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write {folder}: {error.strerror or error}",
            "Free disk space, or name a directory that you may write to.",
        ) from error


def _write(
    lines: Iterator[tuple[ExportLine, bytes]], draft: Path, folder: Path, progress: Progress
) -> Exported:
    first, _ = next(lines, (ExportLine(kind="end"), b""))
    if first.kind != "begin":
        raise Unreachable("the daemon ended the export before it began", "See its log.")
    manifest = Manifest.from_toml(first.manifest)
    num_parameters = sum(
        state_bytes(manifest, stage) for stage in range(manifest.num_stages + 1)
    ) // 4  # fmt: skip
    _refuse_small_disk(draft, folder, 4 * num_parameters + _SPARE_BYTES)
    files = _write_stages(lines, draft, manifest, progress)
    write_index(draft, files)
    write_config(draft, manifest.model, first.separator)
    write_tokenizer(draft, first.tokenizer, first.separator_name, manifest.model.context)
    return Exported(folder, first.step, manifest.num_stages, num_parameters)


def _refuse_small_disk(draft: Path, folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(draft).free
    if free < needed_bytes:
        raise ResourceError(
            f"the model needs {needed_bytes >> 20} MiB, and the disk of {folder} has {free >> 20}",
            "Free disk space, or name a directory on another disk.",
        )


def _write_stages(
    lines: Iterator[tuple[ExportLine, bytes]], draft: Path, manifest: Manifest, progress: Progress
) -> list[StageFile]:
    files: list[StageFile] = []
    num_bytes = 0
    with ExitStack() as stack:
        for line, data in lines:
            if line.kind == "end":
                return files
            if len(files) == line.stage:
                path = draft / stage_file_name(line.stage, manifest.num_stages)
                files.append(StageFile(path, manifest.model.width))
                stack.callback(files[-1].close)
            if line.kind == "stage":
                files[line.stage].end(line.digest)
                continue
            files[line.stage].feed(data, is_first=line.is_first)
            num_bytes = len(data) if line.is_first else num_bytes + len(data)
            progress(line.stage, num_bytes, state_bytes(manifest, line.stage))
    raise Unreachable("the daemon ended in the middle of the export", "Export again.")
