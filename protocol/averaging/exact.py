"""Exact averaging: bit-identical sums, bandwidth-optimal (2 |W| (R-1) / R bytes per member).

Each member owns one shard of the flat gradient. It receives that shard from everybody, adds the
parts in PeerID order in fp32, and returns the same bytes to all. A member has a result only when
every shard came back; whether it may be used is decided elsewhere (PREPARED by all).

In a swarm that sums by slot, a member sends the shard of each of its slots, and the owner adds
them in slot order: the sum no longer depends on who computed what, for a part's bytes per slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import trio

from protocol.averaging.port import Round
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerError
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import ReducePart, ReduceResult
from protocol.ports import Envelope, Network


def shard_bounds(length: int, num_shards: int) -> list[tuple[int, int]]:
    """Split ``length`` elements into ``num_shards`` runs whose sizes differ by at most one."""
    cuts = [length * i // num_shards for i in range(num_shards + 1)]
    return list(pairwise(cuts))


@dataclass(slots=True)
class ExactReduce:
    """The pure rule of one round at one member.

    ``gradients`` [length] are mine, in the order of adding, each over ``num_microbatches``.
    """

    round: Round
    me: PeerId
    gradients: Sequence[torch.Tensor]
    num_microbatches: int
    length: int
    parts: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    total_count: int = 0
    bounds: list[tuple[int, int]] = field(init=False)
    index: int = field(init=False)
    places: tuple[int, ...] = field(init=False)
    _num_added: int = 0
    _count: int = 0
    _sum: torch.Tensor | None = None

    def __post_init__(self) -> None:
        order = self.round.part_order
        self.bounds = shard_bounds(self.length, len(self.round.members))
        self.index = self.round.members.index(self.me)
        self.places = tuple(i for i, source in enumerate(order) if source == self.me)
        for place, part in zip(self.places, self.parts_of(self.index), strict=True):
            self.parts[place] = (part, self.num_microbatches)

    def parts_of(self, index: int) -> list[torch.Tensor]:
        """My own values of a shard (views), in the order of adding."""
        start, end = self.bounds[index]
        return [gradient[start:end] for gradient in self.gradients]

    def on_part(self, place: int, part: torch.Tensor, count: int) -> None:
        """Take another member's values of my shard."""
        self._check(part, self.index)
        if place >= self._num_added:
            self.parts.setdefault(place, (part, count))

    def reduced(self) -> torch.Tensor | None:
        """The sum over my shard, in the order of the parts, once every part is there."""
        if self.index in self.results:
            return None
        while (next_part := self.parts.pop(self._num_added, None)) is not None:
            part, count = next_part
            self._sum = part.clone() if self._sum is None else self._sum.add_(part)
            self._count += count
            self._num_added += 1
        if self._sum is None or self._num_added < len(self.round.part_order):
            return None
        self.results[self.index], self.total_count = self._sum, self._count
        return self._sum

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
        members, order = self.round.members, self.round.part_order
        places = range(self._num_added, len(order))
        owing_parts = {order[place] for place in places if place not in self.parts}
        owing_results = {members[i] for i in range(len(members)) if i not in self.results}
        return frozenset((owing_parts | owing_results) - {self.me})

    def _check(self, values: torch.Tensor, shard: int) -> None:
        start, end = self.bounds[shard]
        if values.shape != (end - start,) or values.dtype != torch.float32:
            raise AveragingFailed(frozenset(), "a shard of the wrong shape")


class ExactAverager:
    """Runs ExactReduce over the data plane; a member brings at most ``most_parts`` parts."""

    def __init__(self, network: Network, deadlines: Deadlines, *, most_parts: int = 1) -> None:
        self._network = network
        self._deadlines = deadlines
        self._current: ExactReduce | None = None
        self._early: dict[PeerId, list[Envelope]] = {}
        self._most_early = most_parts + 1  # and one result
        self._last = (-1, -1)
        self._arrived = trio.Event()

    async def total(
        self, round_: Round, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over all members and the total count; raise AveragingFailed."""
        me = self._network.peer_id
        return await self._run(
            ExactReduce(round_, me, (gradient,), num_microbatches, len(gradient))
        )

    async def total_in_order(
        self, round_: Round, gradients: Sequence[torch.Tensor], length: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over ``round_.sources`` and its count; ``gradients`` are mine, in order.

        Raises AveragingFailed. The gradients must not be changed until it returns.
        """
        return await self._run(ExactReduce(round_, self._network.peer_id, gradients, 1, length))

    async def _run(self, rule: ExactReduce) -> tuple[torch.Tensor, int]:
        round_ = rule.round
        self._current, self._last = rule, (round_.step, round_.term)
        early, self._early = self._early, {}
        for envelope in (e for kept in early.values() for e in kept):
            with suppress(AveragingFailed):  # who sent a wrong shape owes it still
                self.deliver(envelope)
        reason = "deadline"
        try:
            with trio.move_on_after(self._deadlines.averaging_s + round_.grace_s):
                return await self._exchange(rule)
        except* PeerError as group:
            reason = _reason(group)
        finally:
            self._current = None
        # a failed delivery names nobody by itself: whoever owes something is missing
        raise AveragingFailed(rule.missing(), reason)

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
        if isinstance(message, ReducePart) and _brings(rule, envelope.sender, message):
            rule.on_part(message.place, envelope.tensors[0], message.num_microbatches)
        elif isinstance(message, ReduceResult) and _owns(rule, envelope.sender, message.shard):
            rule.on_result(message.shard, envelope.tensors[0])
            rule.total_count = message.num_microbatches
        self._arrived.set()

    def _keep_early(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, ReducePart | ReduceResult):
            return
        order = (message.step, message.term)
        if order <= self._last:
            return
        kept = self._early.setdefault(envelope.sender, [])
        kept[:] = [e for e in kept if _order(e) >= order]  # of its latest round alone
        if len(kept) < self._most_early:
            kept.append(envelope)

    async def _exchange(self, rule: ExactReduce) -> tuple[torch.Tensor, int]:
        async with trio.open_nursery() as nursery:
            for index, member in enumerate(rule.round.members):
                if member != rule.me:
                    nursery.start_soon(self._send_parts, rule, index, member)
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

    async def _send_parts(self, rule: ExactReduce, index: int, member: PeerId) -> None:
        """One after the other: a member may bring many, and each is a frame in memory."""
        r = rule.round
        for place, part in zip(rule.places, rule.parts_of(index), strict=True):
            message = ReducePart(
                step=r.step, epoch=r.epoch, term=r.term, stage=r.stage, shard=index, place=place,
                num_microbatches=rule.num_microbatches,
            )  # fmt: skip
            await self._network.send(member, message, (part,))

    async def _send_result(self, rule: ExactReduce, shard: torch.Tensor, member: PeerId) -> None:
        r = rule.round
        message = ReduceResult(
            step=r.step, epoch=r.epoch, term=r.term, stage=r.stage, shard=rule.index,
            num_microbatches=rule.total_count,
        )  # fmt: skip
        await self._network.send(member, message, (shard,))


def exact_averager(manifest: Manifest, network: Network, deadlines: Deadlines) -> ExactAverager:
    """Return the averager of a manifest that says ``exact``, by holder or by slot."""
    by_slot = manifest.training.sums == "slots"
    return ExactAverager(network, deadlines, most_parts=manifest.training.quota if by_slot else 1)


def _belongs(message: object, round_: Round) -> bool:
    return isinstance(message, ReducePart | ReduceResult) and (
        message.step, message.term, message.stage, message.epoch
    ) == (round_.step, round_.term, round_.stage, round_.epoch)  # fmt: skip


def _order(envelope: Envelope) -> tuple[int, int]:
    message = envelope.message
    assert isinstance(message, ReducePart | ReduceResult)
    return message.step, message.term


def _brings(rule: ExactReduce, sender: PeerId, message: ReducePart) -> bool:
    order = rule.round.part_order
    is_mine = message.shard == rule.index and message.place < len(order)
    return is_mine and order[message.place] == sender


def _owns(rule: ExactReduce, sender: PeerId, shard: int) -> bool:
    return shard < len(rule.round.members) and rule.round.members[shard] == sender


def _reason(group: BaseExceptionGroup[PeerError]) -> str:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return str(first)
