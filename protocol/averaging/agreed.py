"""Averaging by a reducer that may be wrong, as hivemind's: its result counts when all agree on it.

Each try of a round goes the same way at every member:

1. *Ready*: all members have told their reducer's addresses and a nonce (AverageReport).
2. *Reduce*: the reducer averages a scratch buffer in which sentinels stand (``sentinels``).
3. *Complete*: a member whose sentinels are the mean over all members says so. If one member's
   are not, it starts the next try, and everybody follows.
4. *Agree*: when all have said complete, each sends its own shard of the result to all. Members'
   results differ in their last bits; these shards are the same bytes for everybody. A shard that
   is not what the receiver has itself, but for rounding, fails the round.

A member that dies or freezes anywhere falls silent, and the round fails with its name.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import torch
import trio

from protocol.averaging import sentinels
from protocol.averaging.exact import shard_bounds
from protocol.averaging.port import Round
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed, PeerError, SidecarError
from protocol.keys import PeerId
from protocol.messages import AverageReport, ReduceResult
from protocol.ports import Envelope, Network, Observer

# Of a shard's largest number. Rounding differs by about 1e-7; a lost microbatch by far more.
AGREEMENT = 1e-4
MAX_TRIES = 4


class GroupReducer(Protocol):
    """Something that averages matrices within a group, at a given place, with no promise."""

    async def ready(self) -> tuple[str, ...]:
        """Return where other members' reducers reach this one, once it is up."""
        ...

    async def reduce(
        self, values: torch.Tensor, group: str, peers: Sequence[str], num_members: int
    ) -> None:
        """Replace ``values`` by the mean over the group; raise SidecarError if that fails.

        ``group`` is the same text at all of ``peers`` (addresses, this one's included). Whoever
        cancels it, or finds the result wrong, calls ``renew``.
        """
        ...

    def renew(self) -> None:
        """Throw away the reducer in whatever state it is, and start another."""
        ...


@dataclass(slots=True)
class AgreedRound:
    """What one member knows of a round."""

    round: Round
    me: PeerId
    length: int
    attempt: int = 0
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    addresses: tuple[str, ...] = ()
    is_complete: bool = False
    is_over: bool = False
    reports: dict[PeerId, AverageReport] = field(default_factory=dict)
    heard_at: dict[PeerId, float] = field(default_factory=dict)
    failing_since: dict[PeerId, float] = field(default_factory=dict)
    results: dict[PeerId, torch.Tensor] = field(default_factory=dict)
    gave_up: Counter[PeerId] = field(default_factory=Counter)

    @property
    def others(self) -> tuple[PeerId, ...]:
        """All members but this one."""
        return tuple(member for member in self.round.members if member != self.me)

    @property
    def report(self) -> AverageReport:
        """Where this member is."""
        r = self.round
        return AverageReport(
            step=r.step, epoch=r.epoch, term=r.term, stage=r.stage, attempt=self.attempt,
            nonce=self.nonce, addresses=self.addresses, is_complete=self.is_complete,
        )  # fmt: skip

    def bounds_of(self, member: PeerId) -> tuple[int, int]:
        """The shard whose bytes are this member's."""
        members = self.round.members
        return shard_bounds(self.length, len(members))[members.index(member)]

    @property
    def is_overtaken(self) -> bool:
        """Whether another member has given this try up."""
        return any(report.attempt > self.attempt for report in self.reports.values())

    def next_attempt(self) -> None:
        """Give this try up, too; AveragingFailed after the last, with who gave up most often."""
        overtaking = [p for p, report in self.reports.items() if report.attempt > self.attempt]
        self.gave_up.update(overtaking)
        if self.attempt + 1 >= MAX_TRIES:
            missing = frozenset(peer for peer, _ in self.gave_up.most_common(1))
            raise AveragingFailed(missing, f"{MAX_TRIES} tries in vain")
        self.attempt = max([self.attempt + 1, *(self.reports[p].attempt for p in overtaking)])
        self.nonce, self.is_complete = secrets.token_bytes(16), False
        self.addresses = ()  # the reducer may be another one when it is ready again

    def behind(self, *, is_complete: bool = False) -> frozenset[PeerId]:
        """Members that are not ready, or not complete, in this try."""
        found = set()
        for member in self.others:
            report = self.reports.get(member)
            is_here = report is not None and report.attempt == self.attempt and report.addresses
            if not is_here or (is_complete and not (report and report.is_complete)):
                found.add(member)
        return frozenset(found)

    @property
    def nonces(self) -> list[bytes]:
        """What all members drew for this try."""
        return [self.nonce, *(self.reports[member].nonce for member in self.others)]

    @property
    def peers(self) -> tuple[str, ...]:
        """All members' addresses, the same tuple on each of them."""
        told = {member: self.reports[member].addresses for member in self.others}
        told[self.me] = self.addresses
        return tuple(address for member in self.round.members for address in told[member])

    def group_of(self, peers: Sequence[str]) -> str:
        """A name that changes with the members and whenever one of their reducers is renewed."""
        text = "\n".join((str(self.round.stage), *self.round.members, *peers))
        return sha256(text.encode()).hexdigest()

    def lost(self, now: float, limit_s: float) -> frozenset[PeerId]:
        """Members that owe their shard and were not heard, or not reached, for ``limit_s``."""
        since = {**self.failing_since, **self.heard_at}
        owing = (member for member in self.others if member not in self.results)
        return frozenset(m for m in owing if m in since and now - since[m] > limit_s)

    def missing(self) -> frozenset[PeerId]:
        """Whom the round waits for."""
        return (
            frozenset(set(self.others) - self.reports.keys())
            or self.behind()
            or (self.behind(is_complete=True) if self.is_complete else frozenset())
            or (
                frozenset(set(self.others) - self.results.keys())
                if self.is_complete
                else frozenset()
            )
        )


class AgreedAverager:
    """The Averager over a reducer of the stage's members."""

    def __init__(
        self, network: Network, deadlines: Deadlines, reducer: GroupReducer, observer: Observer
    ) -> None:
        self._network, self._deadlines, self._reducer = network, deadlines, reducer
        self._observer = observer
        self._current: AgreedRound | None = None
        self._early: dict[PeerId, AverageReport] = {}
        self._changed = trio.Event()

    async def total(
        self, round_: Round, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int]:
        """Return the sum over all members and the total count; raise AveragingFailed."""
        if len(round_.members) == 1:
            return gradient, num_microbatches
        rule = self._current = AgreedRound(round_, self._network.peer_id, len(gradient))
        for sender, report in self._early.items():
            self._hear(rule, sender, report)
        self._early.clear()
        failure: AveragingFailed | None = None
        try:
            with trio.move_on_after(self._deadlines.averaging_s + round_.grace_s):
                return await self._take_part(rule, gradient, num_microbatches)
        except* PeerError as group:
            failure = _failure(rule, group)
        finally:
            self._current = None
        raise failure or AveragingFailed(rule.missing(), "deadline")

    def deliver(self, envelope: Envelope) -> None:
        """Take a member's report or shard; AveragingFailed for a shard of the wrong shape."""
        message, rule = envelope.message, self._current
        if isinstance(message, AverageReport):
            if rule is not None and _belongs(message, rule.round):
                self._hear(rule, envelope.sender, message)
            else:
                self._early[envelope.sender] = message  # the latest: it is said again and again
        elif (
            isinstance(message, ReduceResult)
            and rule is not None
            and _belongs(message, rule.round)
            and len(envelope.tensors) == 1
        ):
            self._take_shard(rule, envelope.sender, envelope.tensors[0])

    def _hear(self, rule: AgreedRound, sender: PeerId, report: AverageReport) -> None:
        if sender in rule.others and _belongs(report, rule.round):
            rule.reports[sender] = report
            rule.heard_at[sender] = trio.current_time()
            self._notify()

    def _take_shard(self, rule: AgreedRound, sender: PeerId, values: torch.Tensor) -> None:
        if sender not in rule.others:
            return
        start, end = rule.bounds_of(sender)
        if values.shape != (end - start,) or values.dtype != torch.float32:
            raise AveragingFailed(frozenset(), "a shard of the wrong shape")
        rule.results.setdefault(sender, values)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- one member's way through a round --------------------------------------------------

    async def _take_part(
        self, rule: AgreedRound, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int]:
        async with trio.open_nursery() as nursery:
            for member in rule.others:
                nursery.start_soon(self._keep_reporting, rule, member)
            nursery.start_soon(self._watch, rule)
            while (found := await self._try(rule, gradient, num_microbatches)) is None:
                rule.next_attempt()
                self._notify()
            total = await self._agree(rule, found[0])
            nursery.cancel_scope.cancel()
        return total, found[1]

    async def _try(
        self, rule: AgreedRound, gradient: torch.Tensor, num_microbatches: int
    ) -> tuple[torch.Tensor, int] | None:
        """Return sum and count once all members say complete; None if this try is given up."""
        rule.addresses = await self._reducer.ready()
        self._notify()
        if not await self._until_all(rule):
            return None
        packed = sentinels.pack(gradient, num_microbatches, rule.nonce)
        nonces = rule.nonces
        if not await self._reduce(rule, packed):
            return None
        found = None
        if sentinels.is_mean_of(packed, nonces):
            found = sentinels.unpack(packed, rule.length, len(rule.round.members))
        if found is None:
            self._tell(SidecarError("the reducer took a mixture for an average"))
            self._reducer.renew()
            return None
        rule.is_complete = True
        self._notify()
        return found if await self._until_all(rule, is_complete=True) else None

    async def _until_all(self, rule: AgreedRound, *, is_complete: bool = False) -> bool:
        """Wait for the others; False if one of them has given the try up."""
        while rule.behind(is_complete=is_complete):
            if rule.is_overtaken:
                return False
            await self._changed.wait()
        return True

    async def _reduce(self, rule: AgreedRound, packed: torch.Tensor) -> bool:
        """Let the reducer average ``packed`` in place; False if it failed or the try is over."""
        peers, is_done = rule.peers, False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._cancel_when_overtaken, rule, nursery.cancel_scope)
            try:
                group, num_members = rule.group_of(peers), len(rule.round.members)
                await self._reducer.reduce(packed, group, peers, num_members)
                is_done = True
            except SidecarError as error:
                self._tell(error)
            finally:
                if not is_done:
                    self._reducer.renew()
            nursery.cancel_scope.cancel()
        return is_done

    def _tell(self, error: SidecarError) -> None:
        """The next try begins."""
        self._observer.count("errors", code=error.code)
        self._observer.event("averaging_repeated", code=error.code, cause=error.cause)

    async def _cancel_when_overtaken(self, rule: AgreedRound, scope: trio.CancelScope) -> None:
        while not rule.is_overtaken:
            await self._changed.wait()
        scope.cancel()

    async def _agree(self, rule: AgreedRound, mine: torch.Tensor) -> torch.Tensor:
        """Exchange shards and return the whole, the same bytes at every member."""
        start, end = rule.bounds_of(rule.me)
        rule.results[rule.me] = mine[start:end]
        async with trio.open_nursery() as nursery:
            for member in rule.others:
                nursery.start_soon(self._send_shard, rule, member)
            while len(rule.results) < len(rule.round.members):
                await self._changed.wait()
        for member, shard in rule.results.items():
            start, end = rule.bounds_of(member)
            if not _agrees(shard, mine[start:end]):
                raise AveragingFailed(frozenset({member}), "another result than mine")
        return torch.cat([rule.results[member] for member in rule.round.members])

    async def _send_shard(self, rule: AgreedRound, member: PeerId) -> None:
        r = rule.round
        message = ReduceResult(
            step=r.step, epoch=r.epoch, term=r.term, stage=r.stage,
            shard=r.members.index(rule.me), num_microbatches=0,
        )  # fmt: skip
        try:
            await self._network.send(member, message, (rule.results[rule.me],))
        except PeerError as error:
            raise AveragingFailed(frozenset({member}), error.cause) from error

    async def _keep_reporting(self, rule: AgreedRound, member: PeerId) -> None:
        """Say where I am whenever that changes, and now and then: silence means that I am lost."""
        while True:
            report = rule.report
            try:
                await self._network.send(member, report)
                rule.failing_since.pop(member, None)
            except PeerError:
                rule.failing_since.setdefault(member, trio.current_time())
            with trio.move_on_after(self._deadlines.heartbeat_s):
                while rule.report == report:
                    await self._changed.wait()

    async def _watch(self, rule: AgreedRound) -> None:
        while True:
            await trio.sleep(self._deadlines.heartbeat_s)
            lost = rule.lost(trio.current_time(), self._deadlines.session_silence_s)
            if lost:
                raise AveragingFailed(lost, "silent")


def _failure(rule: AgreedRound, group: BaseExceptionGroup[PeerError]) -> AveragingFailed:
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    if isinstance(first, AveragingFailed):
        return first
    return AveragingFailed(rule.missing(), str(first))


def _belongs(message: AverageReport | ReduceResult, round_: Round) -> bool:
    return (message.step, message.term, message.stage, message.epoch) == (
        round_.step, round_.term, round_.stage, round_.epoch
    )  # fmt: skip


def _agrees(theirs: torch.Tensor, mine: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding; what is not finite must be so in both."""
    if not len(mine):
        return True
    scale = float(torch.nan_to_num(mine, nan=0.0, posinf=0.0, neginf=0.0).abs().max())
    return torch.allclose(theirs, mine, rtol=0.0, atol=AGREEMENT * scale, equal_nan=True)
