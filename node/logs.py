"""The node's log: ``key=value`` lines on stderr, JSON lines in a file of bounded size.

A field whose name speaks of a secret is never written, nor are raw bytes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from node.files import end_last_line
from protocol.errors import ResourceError

LOGGER = logging.getLogger("shoal")
MAX_FILE_BYTES = 10 * 2**20
NUM_OLD_FILES = 3
_MAX_VALUE_CHARS = 500
# As often as every step, or once for each joiner: it would hide all else.
_ROUTINE = {"snapshot_saved", "peer_probed"}
_SECRET = re.compile(r"(^|_)(key|seed|secret|token|password|signature|prompt)$")
_PLAIN = re.compile(r"[^\s\"=]+")

Fields = Mapping[str, object]


def log_event(name: str, fields: Fields, *, is_problem: bool = False) -> None:
    """Log an event (snake_case, past tense) with its fields."""
    quiet = logging.DEBUG if name in _ROUTINE else logging.INFO
    level = logging.WARNING if is_problem else quiet
    LOGGER.log(level, name, extra={"fields": {key: _clean(key, fields[key]) for key in fields}})


@contextmanager
def logging_to(file: Path, level: str, *, on_stderr: bool = True) -> Iterator[None]:
    """Send the log to ``file`` and stderr while the block runs; raise ResourceError.

    ``level`` is a lower-case name; stderr is left out where a live table owns the terminal.
    """
    handlers: list[logging.Handler] = [_file_handler(file)]
    if on_stderr:
        handlers.append(logging.StreamHandler())
        handlers[-1].setFormatter(_KeyValueFormatter())
    was_propagating, LOGGER.propagate = LOGGER.propagate, False
    LOGGER.setLevel(level.upper())
    for handler in handlers:
        LOGGER.addHandler(handler)
    try:
        yield
    finally:
        LOGGER.propagate = was_propagating
        for handler in handlers:
            LOGGER.removeHandler(handler)
            handler.close()


class _OwnersFileHandler(RotatingFileHandler):
    """Every file, also after rotation, is the owner's alone."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """A full disk costs lines of the log, not a traceback for each of them."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def _open(self):  # type: ignore[no-untyped-def]
        end_last_line(Path(self.baseFilename))
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream


def _file_handler(file: Path) -> logging.Handler:
    try:
        handler = _OwnersFileHandler(file, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES)
    except OSError as error:
        raise ResourceError(f"cannot write the log {file}: {error.strerror}") from error
    handler.setFormatter(_JsonFormatter())
    return handler


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_line(self, record), default=str)


class _KeyValueFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = _line(self, record)
        line.pop("traceback", None)  # that of the file is enough
        head = f"{line.pop('time')} {line.pop('level')} {line.pop('event')}"
        return " ".join([head, *(f"{key}={_quoted(value)}" for key, value in line.items())])


def _line(formatter: logging.Formatter, record: logging.LogRecord) -> dict[str, object]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    line: dict[str, object] = {
        "time": time.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "event": record.getMessage(),
    }
    line.update(getattr(record, "fields", {}))
    if record.exc_info:
        line["traceback"] = formatter.formatException(record.exc_info)
    return line


def _clean(key: str, value: object) -> object:
    """Return what may be written: no secrets, no bytes, nothing long."""
    if _SECRET.search(key):
        return "(not logged)"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"({len(value)} bytes)"
    if isinstance(value, bool | int | float | None):
        return value
    return str(value)[:_MAX_VALUE_CHARS]


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
