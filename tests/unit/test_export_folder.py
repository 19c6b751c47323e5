"""The folder of an export is whole or not there, whatever goes wrong on the way."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stages_kit import make_blocks, make_edge, make_manifest

from node import export_folder
from node.export_folder import export_model
from node.status import ExportLine
from protocol.errors import ConfigError, ResourceError, StateMismatch, Unreachable
from stages.tokenizer import make_tokenizer

MANIFEST = make_manifest()
Line = tuple[ExportLine, bytes]


class Daemon:
    """Emits an export; ``lines`` are what it says."""

    def __init__(self) -> None:
        tokenizer = make_tokenizer(MANIFEST.model)
        self.lines: list[Line] = [
            (
                ExportLine(
                    kind="begin", step=5, manifest=MANIFEST.to_toml(),
                    tokenizer=tokenizer.to_json(), separator=256, separator_name="<|endoftext|>",
                ),
                b"",
            )
        ]  # fmt: skip
        for stage in (make_edge(MANIFEST), *make_blocks(MANIFEST)):
            data = stage.export_state().numpy().tobytes()
            for first in range(0, len(data), 50_000):
                line = ExportLine(kind="piece", stage=stage.stage, is_first=not first)
                self.lines.append((line, data[first : first + 50_000]))
            end = ExportLine(kind="stage", stage=stage.stage, digest=stage.digest)
            self.lines.append((end, b""))
        self.lines.append((ExportLine(kind="end"), b""))

    def export(self) -> Iterator[Line]:
        yield from self.lines


def quietly(stage: int, num_bytes: int, weight_bytes: int) -> None:
    """Show no progress."""


def test_a_folder_is_written_whole(tmp_path: Path) -> None:
    told: list[int] = []
    folder = tmp_path / "new" / "hf"
    done = export_model(Daemon(), folder, lambda stage, *_: told.append(stage))
    assert (done.step, done.num_stages, done.folder) == (5, 2, folder)
    assert sorted(set(told)) == [0, 1, 2]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json",
        *(f"model-0000{k}-of-00003.safetensors" for k in (1, 2, 3)),
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in folder.parent.iterdir()] == ["hf"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    export_model(Daemon(), tmp_path / "hf", quietly)
    assert (tmp_path / "hf" / "config.json").exists()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    mine = folder if kind == "file" else folder / "mine"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    with pytest.raises(ConfigError, match="is there already"):
        export_model(Daemon(), folder, quietly)
    assert mine.read_text() == "mine"


def cut(daemon: Daemon) -> None:
    del daemon.lines[5:]


def spoil(daemon: Daemon) -> None:
    line, data = daemon.lines[2]
    daemon.lines[2] = line, data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(("harm", "error"), [(cut, Unreachable), (spoil, StateMismatch)])
def test_a_daemon_that_fails_leaves_nothing(harm, error, tmp_path: Path) -> None:
    daemon = Daemon()
    harm(daemon)
    with pytest.raises(error):
        export_model(daemon, tmp_path / "hf", quietly)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(stage: int, *_: int) -> None:
        if stage == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(Daemon(), tmp_path / "hf", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_and_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(export_folder.shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ResourceError, match="the model needs"):
            export_model(Daemon(), tmp_path / "hf", quietly)

    def full(*_: object, is_first: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_folder.StageFile, "feed", full)
    with pytest.raises(ResourceError, match="No space left"):
        export_model(Daemon(), tmp_path / "hf", quietly)
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot write"):
        export_model(Daemon(), tmp_path / "file" / "hf", quietly)
