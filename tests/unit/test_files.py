"""Small files stay whole, whatever hits them."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from node.files import all_or_none, append_line, replace_text
from node.logs import LOGGER, log_event, logging_to


@pytest.mark.parametrize("half", ["", "whole\n", '{"step": 6, "te'])
def test_a_line_stands_alone_also_behind_half_a_line(tmp_path: Path, half: str) -> None:
    path = tmp_path / "lines"
    path.write_text(half)
    append_line(path, "next")
    append_line(path, "last")
    assert path.read_text().splitlines() == [*half.splitlines(), "next", "last"]


def test_the_log_goes_on_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"time": "20')
    with logging_to(path, "info", on_stderr=False):
        log_event("node_ready", {})
        assert LOGGER.handlers
    half, line = path.read_text().splitlines()
    assert half == '{"time": "20'
    assert '"event": "node_ready"' in line


def test_what_cannot_be_written_leaves_the_old_text_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "manifest.toml"
    replace_text(path, "old")

    def full(_: Path, text: str) -> None:
        (tmp_path / "manifest.toml.new").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_all_files_change_or_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("before")

    def fail() -> None:
        with all_or_none(old, new):
            old.write_text("after")
            new.write_text("after")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert old.read_text() == "before"
    assert not new.exists()
    with all_or_none(old, new):
        new.write_text("kept")
    assert new.read_text() == "kept"
