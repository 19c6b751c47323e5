"""The Averager port: a sum over the holders of a stage, the same bytes on every one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.keys import PeerId
from protocol.ports import Envelope


@dataclass(frozen=True, slots=True)
class Round:
    """One averaging: who takes part, under which decision. ``members`` are in PeerID order.

    ``grace_s`` is how much later than others a member may start, because it had to recompute.
    """

    step: int
    term: int
    epoch: int
    stage: int
    members: tuple[PeerId, ...]
    grace_s: float = 0.0


class Averager(Protocol):
    """Sums flat fp32 gradients and microbatch counts over the members of a round."""

    async def total(
        self, round_: Round, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over all members and the total count; raise AveragingFailed."""
        ...

    def deliver(self, envelope: Envelope) -> None:
        """Take a message of this averager's kinds from another member."""
        ...
