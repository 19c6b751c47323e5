"""One try at one microbatch, as its data node sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import trio

from protocol.keys import PeerId
from protocol.messages import Purpose, WorkId
from protocol.ports import Tensor

VALIDATION_SLOTS = 2**40
GENERATION_SLOTS = 2**41
RETRY_PAUSE_S = 0.1


@dataclass(slots=True)
class Flow:
    """What is known of a try; ``counted`` is the first hop that the router counts it for."""

    id: WorkId
    purpose: Purpose
    first: PeerId | None = None
    counted: PeerId | None = None
    sent_at: float = 0.0
    pause_s: float = RETRY_PAUSE_S
    activation: Tensor | None = None
    gradient: Tensor | None = None
    path: tuple[PeerId, ...] = ()
    loss: float = math.nan
    result: Tensor | None = None
    is_back: bool = False
    failure: str | None = None
    target_stage: int = 0
    target: PeerId | None = None
    avoid: set[PeerId] = field(default_factory=set)
    settled: trio.Event = field(default_factory=trio.Event)

    def settle(self, failure: str | None = None) -> None:
        """The try came to its end, well or not."""
        if not self.settled.is_set():
            self.failure = failure
            self.settled.set()
