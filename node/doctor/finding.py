"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.errors import ShoalError

Mark = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found; ``remedy`` is empty where there is nothing to do."""

    check: str
    mark: Mark
    cause: str
    remedy: str = ""


def ok(check: str, cause: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", cause)


def warning(check: str, cause: str, remedy: str) -> Finding:
    """The node works, but not as it could."""
    return Finding(check, "warning", cause, remedy)


def wrong(check: str, cause: str, remedy: str) -> Finding:
    """The node would not work."""
    return Finding(check, "error", cause, remedy)


def of_error(check: str, error: ShoalError) -> Finding:
    """What the node itself would say."""
    return wrong(check, error.cause, error.hint)
