"""What a node's work amounts to over all its runs: its owner's reward, so a restart keeps it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from node.files import replace_text


class Work(BaseModel):
    """``microbatches`` that count with this node's part in them, and the steps that had any."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    microbatches: NonNegativeInt = 0
    steps: NonNegativeInt = 0


class Totals:
    """Adds to what the file holds. What a kill may cost is the work since the last ``save``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.work = self._saved = read_work(path)
        self._last_step = -1

    def note(self, step: int, num_microbatches: int) -> None:
        """So many more microbatches of a step count."""
        is_new = step != self._last_step
        self._last_step = step
        self.work = Work(
            microbatches=self.work.microbatches + num_microbatches, steps=self.work.steps + is_new
        )

    def save(self) -> None:
        """Write the file if it is out of date; a full disk costs the count and nothing else."""
        if self.work != self._saved:
            with suppress(OSError):
                replace_text(self._path, self.work.model_dump_json())
                self._saved = self.work


def read_work(path: Path) -> Work:
    """Return what a file holds; a missing or damaged one holds nothing."""
    try:
        return Work.model_validate_json(path.read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return Work()
