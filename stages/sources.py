"""Documents from UTF-8 text files, folders of them and .jsonl; by default, Python's own sources."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from protocol.errors import ConfigError

DEFAULT_MAX_BYTES = 8_000_000
_FEW_DOCUMENTS = 20
_NUM_PIECES = 100
_NOT_TEXT_HINT = 'Give UTF-8 text files, folders of them, or .jsonl files of {"text": ...}.'
_SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


def read_documents(paths: Sequence[Path]) -> list[bytes]:
    """Read all documents, in the order of the paths and, in a folder, of sorted names.

    In a folder, hidden files and files that are not text are passed over. Raises ConfigError.
    """
    documents = [document for path in paths for document in _documents_at(Path(path))]
    if not documents:
        raise ConfigError(f"no text in {', '.join(map(str, paths)) or 'no path'}", _NOT_TEXT_HINT)
    return documents


def standard_library_documents(max_bytes: int = DEFAULT_MAX_BYTES) -> list[bytes]:
    """Read the .py files of Python's standard library in sorted order, tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: list[bytes] = []
    room = max_bytes
    for path in _files_below(root, skipped=_SKIPPED_FOLDERS):
        document = path.read_bytes() if path.suffix == ".py" else b""
        if not document or not _is_text(document):
            continue
        if len(document) > room:
            break
        documents.append(document)
        room -= len(document)
    if not documents:
        raise ConfigError(f"no Python sources below {root}", "Give a folder of text files instead.")
    return documents


def divide_if_few(documents: list[bytes]) -> list[bytes]:
    """Cut a corpus of few documents into about 100 pieces, at ends of lines.

    Whole documents are held out for validation; one long file must serve as many.
    """
    if len(documents) >= _FEW_DOCUMENTS:
        return documents
    piece_bytes = max(1, sum(map(len, documents)) // _NUM_PIECES)
    return [piece for document in documents for piece in _pieces(document, piece_bytes)]


def _documents_at(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        for file in filter(Path.is_file, _files_below(path)):
            yield from _documents_in(file, must_be_text=False)
    elif path.is_file():
        yield from _documents_in(path, must_be_text=True)
    else:
        raise ConfigError(f"{path} does not exist", _NOT_TEXT_HINT)


def _documents_in(path: Path, *, must_be_text: bool) -> Iterable[bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", _NOT_TEXT_HINT) from error
    if not _is_text(content):
        if must_be_text:
            raise ConfigError(f"{path} is not UTF-8 text", _NOT_TEXT_HINT)
        return []
    if path.suffix == ".jsonl":
        return _json_lines(path, content)
    return [content] if content else []


def _json_lines(path: Path, content: bytes) -> Iterator[bytes]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or "\0" in text:
            raise ConfigError(f'{path}, line {number}, is not {{"text": "..."}}', _NOT_TEXT_HINT)
        if text:
            yield text.encode(errors="replace")


def _files_below(root: Path, *, skipped: Collection[str] = ()) -> list[Path]:
    found: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and name[0] != "."]
        found += [f"{folder}/{name}" for name in names if name[0] != "."]
    return [Path(path) for path in sorted(found)]


def _is_text(content: bytes) -> bool:
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _pieces(document: bytes, piece_bytes: int) -> Iterator[bytes]:
    start = 0
    while start < len(document):
        end = document.find(b"\n", start + piece_bytes - 1) + 1 or len(document)
        yield document[start:end]
        start = end
