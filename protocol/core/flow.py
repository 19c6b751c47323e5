"""One try at one microbatch, as its data node sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from protocol.core.passage import Passage, Path

VALIDATION_SLOTS = 2**40
RETRY_PAUSE_S = 0.1


@dataclass(slots=True)
class Flow(Passage):
    """A passage whose two ends are here: ahead to stage 1, back to the last stage.

    ``path`` is the one by which the activation came home, and then that of the gradient.
    """

    path: Path = ()
    loss: float = math.nan
    failure: str | None = None
    has_branches: bool = False
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    latest_at: float = math.inf
    home: trio.Event = field(default_factory=trio.Event)
    settled: trio.Event = field(default_factory=trio.Event)

    def settle(self, failure: str | None = None) -> None:
        """The try came to its end, well or not."""
        if not self.settled.is_set():
            self.failure = failure
            self.settled.set()
            self.end()

    def prolong(self, limit_s: float) -> None:
        """There is news: it may take so long from now on, within its own time."""
        self.scope.deadline = min(self.latest_at, trio.current_time() + limit_s)
