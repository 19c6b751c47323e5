"""Named points of the step at which a test may end this process, as a power cut would.

``SHOAL_FAULT=after_commit@3`` kills the node with SIGKILL when it passes that point in step 3, and
``in_state_transfer@any`` when it first passes that one: nobody knows when a joiner will.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from node.config import FAULT_VARIABLE
from protocol.errors import ConfigError
from protocol.ports import FaultPoints

POINTS = frozenset(
    {
        "before_step", "after_forward", "before_backward", "after_input_gradient", "after_commit",
        "before_close", "in_reconcile", "in_reduce", "after_prepared", "before_apply",
        "after_apply", "in_state_transfer", "in_rebuild",
    }
)  # fmt: skip


class NoFaults:
    """What every node has outside of tests."""

    async def reach(self, point: str, step: int) -> None:
        """Go on."""


@dataclass(frozen=True, slots=True)
class KillAt:
    """Ends this process at a point of a step, without a chance to say goodbye."""

    point: str
    step: int | None  # None: any

    async def reach(self, point: str, step: int) -> None:
        """Die here, or go on."""
        if point == self.point and self.step in (None, step):
            os.kill(os.getpid(), signal.SIGKILL)


def faults_from(environment: Mapping[str, str]) -> FaultPoints:
    """Return what the environment asks for; raise ConfigError if it names no known point."""
    text = environment.get(FAULT_VARIABLE)
    if text is None:
        return NoFaults()
    point, _, step = text.partition("@")
    if point not in POINTS or not (step == "any" or step.isdecimal()):
        raise ConfigError(
            f"{FAULT_VARIABLE}={text!r} is neither POINT@STEP nor POINT@any",
            f"Unset {FAULT_VARIABLE}; it is there for tests.",
        )
    return KillAt(point, None if step == "any" else int(step))
