"""What the log does when it cannot be written, and where a traceback goes."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest

from node.logs import LOGGER, log_event, logging_to


class FullDisk(io.StringIO):
    """A file on a disk without room."""

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_lines_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path / "log.jsonl", "info", on_stderr=False):
        handler = LOGGER.handlers[-1]
        real, handler.stream = handler.stream, FullDisk()  # type: ignore[attr-defined]
        real.close()
        log_event("things_happened", {"number": 1})
    assert capfd.readouterr().err == ""


def test_a_traceback_goes_to_the_file_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path / "log.jsonl", "info"):
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            LOGGER.error("daemon_failed", exc_info=True)
    assert "Traceback" in (tmp_path / "log.jsonl").read_text()
    told = capfd.readouterr().err
    assert "daemon_failed" in told
    assert "Traceback" not in told
