"""Exact averaging: bit-identical sums, bandwidth-optimal (2 |W| (R-1) / R bytes per member).

Each member owns one shard of the flat gradient. It receives that shard from everybody, adds the
parts in PeerID order in fp32, and returns the same bytes to all. A member has a result only when
every shard came back; whether it may be used is decided elsewhere (PREPARED by all).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import trio

from protocol.averaging.port import Round
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerError
from protocol.keys import PeerId
from protocol.messages import ReducePart, ReduceResult
from protocol.ports import Envelope, Network


def shard_bounds(length: int, num_shards: int) -> list[tuple[int, int]]:
    """Split ``length`` elements into ``num_shards`` runs whose sizes differ by at most one."""
    cuts = [length * i // num_shards for i in range(num_shards + 1)]
    return list(pairwise(cuts))


@dataclass(slots=True)
class ExactReduce:
    """The pure rule of one round at one member."""

    round: Round
    me: PeerId
    gradient: torch.Tensor
    num_microbatches: int
    parts: dict[PeerId, tuple[torch.Tensor, int]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    total_count: int = 0
    bounds: list[tuple[int, int]] = field(init=False)
    index: int = field(init=False)

    def __post_init__(self) -> None:
        self.bounds = shard_bounds(self.gradient.numel(), len(self.round.members))
        self.index = self.round.members.index(self.me)
        self.parts[self.me] = (self.shard_of(self.index), self.num_microbatches)

    def shard_of(self, index: int) -> torch.Tensor:
        """My own values of a shard (a view)."""
        start, end = self.bounds[index]
        return self.gradient[start:end]

    def on_part(self, sender: PeerId, part: torch.Tensor, count: int) -> None:
        """Take another member's values of my shard."""
        self._check(part, self.index)
        self.parts.setdefault(sender, (part, count))

    def reduced(self) -> torch.Tensor | None:
        """The sum over my shard, in PeerID order, once every part is there."""
        if len(self.parts) < len(self.round.members) or self.index in self.results:
            return None
        total = self.parts[self.round.members[0]][0].clone()
        for member in self.round.members[1:]:
            total += self.parts[member][0]
        self.total_count = sum(count for _, count in self.parts.values())
        self.results[self.index] = total
        return total

    def on_result(self, shard: int, values: torch.Tensor) -> None:
        """Take a finished shard from its owner."""
        self._check(values, shard)
        self.results.setdefault(shard, values)

    def complete(self) -> torch.Tensor | None:
        """The whole sum once every shard is there."""
        if len(self.results) < len(self.bounds):
            return None
        return torch.cat([self.results[i] for i in range(len(self.bounds))])

    def missing(self) -> frozenset[PeerId]:
        """Members that owe a part or a result."""
        members = self.round.members
        owing_parts = set(members) - self.parts.keys()
        owing_results = {members[i] for i in range(len(members)) if i not in self.results}
        return frozenset((owing_parts | owing_results) - {self.me})

    def _check(self, values: torch.Tensor, shard: int) -> None:
        start, end = self.bounds[shard]
        if values.shape != (end - start,) or values.dtype != torch.float32:
            raise AveragingFailed(frozenset(), "a shard of the wrong shape")


class ExactAverager:
    """Runs ExactReduce over the data plane."""

    def __init__(self, network: Network, deadlines: Deadlines) -> None:
        self._network = network
        self._deadlines = deadlines
        self._current: ExactReduce | None = None
        self._early: dict[tuple[PeerId, str], Envelope] = {}
        self._last = (-1, -1)
        self._arrived = trio.Event()

    async def total(
        self, round_: Round, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over all members and the total count; raise AveragingFailed."""
        rule = ExactReduce(round_, self._network.peer_id, gradient, num_microbatches)
        self._current, self._last = rule, (round_.step, round_.term)
        early, self._early = self._early, {}
        for envelope in early.values():
            with suppress(AveragingFailed):  # who sent a wrong shape owes it still
                self.deliver(envelope)
        try:
            with trio.move_on_after(self._deadlines.averaging_s + round_.grace_s):
                return await self._exchange(rule)
            raise AveragingFailed(rule.missing(), "deadline")
        except* PeerError as group:
            # a failed delivery names nobody by itself: whoever owes something is missing
            raise AveragingFailed(rule.missing(), _reason(group)) from None
        finally:
            self._current = None

    def deliver(self, envelope: Envelope) -> None:
        """Take a member's part or result; keep it for a round that starts a little later.

        Raises AveragingFailed for a shard of the wrong shape.
        """
        message = envelope.message
        rule = self._current
        if rule is None or not _belongs(message, rule.round):
            self._keep_early(envelope)
            return
        if envelope.sender not in rule.round.members or len(envelope.tensors) != 1:
            return
        if isinstance(message, ReducePart) and message.shard == rule.index:
            rule.on_part(envelope.sender, envelope.tensors[0], message.num_microbatches)
        elif isinstance(message, ReduceResult) and _owns(rule, envelope.sender, message.shard):
            rule.on_result(message.shard, envelope.tensors[0])
            rule.total_count = message.num_microbatches
        self._arrived.set()

    def _keep_early(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, ReducePart | ReduceResult):
            return
        if (message.step, message.term) <= self._last:
            return
        self._early[envelope.sender, message.kind] = envelope  # a member sends one of each a round

    async def _exchange(self, rule: ExactReduce) -> tuple[torch.Tensor, int]:
        async with trio.open_nursery() as nursery:
            for index, member in enumerate(rule.round.members):
                if member != rule.me:
                    nursery.start_soon(self._send_part, rule, index, member)
            while (whole := rule.complete()) is None:
                shard = rule.reduced()
                if shard is not None:
                    for member in rule.round.members:
                        if member != rule.me:
                            nursery.start_soon(self._send_result, rule, shard, member)
                    continue
                self._arrived = trio.Event()
                await self._arrived.wait()
        return whole, rule.total_count

    async def _send_part(self, rule: ExactReduce, index: int, member: PeerId) -> None:
        r = rule.round
        message = ReducePart(
            step=r.step, epoch=r.epoch, term=r.term, stage=r.stage, shard=index,
            num_microbatches=rule.num_microbatches,
        )  # fmt: skip
        await self._network.send(member, message, (rule.shard_of(index),))

    async def _send_result(self, rule: ExactReduce, shard: torch.Tensor, member: PeerId) -> None:
        r = rule.round
        message = ReduceResult(
            step=r.step, epoch=r.epoch, term=r.term, stage=r.stage, shard=rule.index,
            num_microbatches=rule.total_count,
        )  # fmt: skip
        await self._network.send(member, message, (shard,))


def _belongs(message: object, round_: Round) -> bool:
    return isinstance(message, ReducePart | ReduceResult) and (
        message.step, message.term, message.stage, message.epoch
    ) == (round_.step, round_.term, round_.stage, round_.epoch)  # fmt: skip


def _owns(rule: ExactReduce, sender: PeerId, shard: int) -> bool:
    return shard < len(rule.round.members) and rule.round.members[shard] == sender


def _reason(group: BaseExceptionGroup[PeerError]) -> str:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)
