"""The node's durable memory: an authority's ballot, and one line per decision and per step.

The lines are for people and tests; a node reads of them only what it decided last, when it starts.
Of each kind, the last ``MAX_FILE_BYTES`` to twice as many are kept, the older half in a file of its
own.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
from pydantic import BaseModel, ConfigDict

from node.files import append_line
from node.status import StepStatus
from protocol.core.journal import StepReport
from protocol.errors import ResourceError
from protocol.messages import Decision, StepOpen

REPORTS_KEPT = 1024
MAX_FILE_BYTES = 16 * 2**20  # some thousand steps
OLD_SUFFIX = ".1"
_NOT_VALIDATED = b'"validation_loss": null'


class _Ballot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    promised: int
    accepted: StepOpen | None


class FileJournal:
    """Implements Journal on files of the state directory."""

    def __init__(
        self, ballot: Path, decisions: Path, steps: Path, tell: Callable[[ResourceError], None]
    ) -> None:
        self._ballot, self._decisions, self._steps = ballot, decisions, steps
        self._tell, self._is_failing = tell, False
        # without their entries, which are most of a report
        self.reports: deque[StepStatus] = deque(maxlen=REPORTS_KEPT)
        # of an earlier life, too: who looks at a swarm that was started again wants to know
        self.last_step = self._earlier(lambda line: True)
        self.last_validation = self._earlier(lambda line: _NOT_VALIDATED not in line)

    def save_ballot(self, promised: int, accepted: StepOpen | None) -> None:
        """Write and sync before returning: what was promised must survive a power cut."""
        draft = self._ballot.with_suffix(".new")
        # not JSON: the votes in it are signatures, which are bytes
        data = msgpack.packb(_Ballot(promised=promised, accepted=accepted).model_dump())
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._ballot)
            sync_directory(self._ballot.parent)  # or the old name may come back
        except OSError as error:
            raise _cannot_write(self._ballot, error) from error

    def load_ballot(self) -> tuple[int, StepOpen | None]:
        """Return what was saved last; raise ResourceError if the file is damaged."""
        if not self._ballot.exists():
            return 0, None
        try:
            ballot = _Ballot.model_validate(msgpack.unpackb(self._ballot.read_bytes()))
        except (OSError, ValueError, msgpack.UnpackException) as error:
            raise ResourceError(
                f"{self._ballot} cannot be read", "Restore it from a backup of the state directory."
            ) from error
        return ballot.promised, ballot.accepted

    def decided(self, decision: Decision) -> None:
        """Append the decision."""
        self._append(self._decisions, decision.model_dump_json())

    def last_decision(self) -> Decision | None:
        """Read the last whole line; a power cut may have left half of one behind it."""
        return next(self.past_decisions(), None)

    def past_decisions(self) -> Iterator[Decision]:
        """Read whole lines from the last one on."""
        for line in _from_the_last(self._decisions):
            with suppress(ValueError):
                yield Decision.model_validate_json(line)

    def step_finished(self, report: StepReport) -> None:
        """Append the step and keep it for ``status``."""
        self.last_step = _status_of(report)
        if report.validation_loss is not None:
            self.last_validation = self.last_step
        self.reports.append(self.last_step)
        self._append(self._steps, json.dumps(report.model_dump(mode="json")))

    def _earlier(self, is_wanted: Callable[[bytes], bool]) -> StepStatus | None:
        """Read the last step that earlier lives finished, of those that are wanted."""
        for line in filter(is_wanted, _from_the_last(self._steps)):
            with suppress(ValueError):
                return _status_of(StepReport.model_validate_json(line))
        return None

    def _append(self, path: Path, line: str) -> None:
        """A full disk costs lines, not the node; it is told once until it works again."""
        try:
            if path.exists() and path.stat().st_size + len(line) >= MAX_FILE_BYTES:
                path.replace(path.with_name(path.name + OLD_SUFFIX))
            append_line(path, line)
        except OSError as error:
            if not self._is_failing:
                self._tell(_cannot_write(path, error))
            self._is_failing = True
        else:
            self._is_failing = False


def _status_of(report: StepReport) -> StepStatus:
    return StepStatus(
        step=report.step,
        loss=report.loss,
        validation_loss=report.validation_loss,
        tokens=report.tokens,
        seconds=report.seconds,
        committed=len(report.entries),
        reissued=report.reissued,
    )


def _from_the_last(path: Path) -> Iterator[bytes]:
    """Yield the lines of a rotated file, the newest first."""
    for part in (path, path.with_name(path.name + OLD_SUFFIX)):
        yield from reversed(_lines(part))


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ResourceError(
            f"cannot read {path}: {error.strerror}", "Make the state directory readable."
        ) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"cannot write {path}: {error.strerror}", "Free disk space or make the directory writable."
    )
