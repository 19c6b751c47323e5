"""Small files that a crash, a full disk or a power cut may hit at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Put ``text`` in place of what a file holds, whole; if that fails, the old content stays."""
    draft = path.with_name(f"{path.name}.new")
    try:
        draft.write_text(text)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def append_line(path: Path, line: str) -> None:
    """Append a line of its own, also behind half a line that a power cut or a full disk left."""
    end_last_line(path)
    with path.open("a") as file:
        file.write(line + "\n")


def end_last_line(path: Path) -> None:
    """End the last line of a file that was cut off, or what is appended would be part of it."""
    with suppress(FileNotFoundError), path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
            file.write(b"\n")


@contextmanager
def all_or_none(*files: Path) -> Iterator[None]:
    """If the block fails, bring each file back to what it was, and leave none that is new."""
    before = {path: path.read_bytes() if path.exists() else None for path in files}
    is_whole = False
    try:
        yield
        is_whole = True
    finally:
        for path, content in () if is_whole else before.items():
            with suppress(OSError):
                _bring_back(path, content)


def _bring_back(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    elif path.read_bytes() != content:
        path.write_bytes(content)
