"""The Averager port: a sum over the holders of a stage, the same bytes on every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protocol.keys import PeerId
from protocol.ports import Envelope


@dataclass(frozen=True, slots=True)
class Round:
    """One averaging: who takes part, under which decision. ``members`` are in PeerID order.

    ``grace_s`` is how much later than others a member may start, because it had to recompute.
    ``sources`` names who brings each part, in the order of adding; empty stands for one part of
    each member, in PeerID order.
    """

    step: int
    term: int
    epoch: int
    stage: int
    members: tuple[PeerId, ...]
    grace_s: float = 0.0
    sources: tuple[PeerId, ...] = ()

    @property
    def part_order(self) -> tuple[PeerId, ...]:
        """Who brings each part, in the order of adding."""
        return self.sources or self.members


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


class OrderedAverager(Averager, Protocol):
    """Also adds single gradients in an order that does not depend on who brings which."""

    async def total_in_order(
        self, round_: Round, gradients: Sequence[torch.Tensor], length: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over ``round_.sources`` and its count; ``gradients`` are mine, in order.

        Raises AveragingFailed. The gradients must not be changed until it returns.
        """
        ...
