"""The end of a step at one member: reconcile, recompute what is missing, average, prepare.

Runs once per term; a new term of the same step starts it again, and what the sums hold stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import trio

from protocol.averaging import Round
from protocol.core.context import Context
from protocol.core.data_flow import DataFlow
from protocol.core.holder_flow import HolderFlow
from protocol.core.repair import Repair
from protocol.core.signal import Signal
from protocol.errors import AveragingFailed, PeerTimeout, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import Decision, Entry, Ledger, Prepared, StepClose, Suspect
from protocol.ports import Tensor
from protocol.step.decision import check_close
from protocol.step.ledger import SlotId, StepLedger, assignments, drawing_nodes, duplicates

REPEAT_S = 1.0


class Closing:
    """Brings one member from the last commit to PREPARED."""

    def __init__(
        self, ctx: Context, ledger: StepLedger, flow: HolderFlow | DataFlow, repair: Repair
    ) -> None:
        self._ctx = ctx
        self._ledger = ledger
        self._flow = flow
        self._repair = repair
        self._ledgers: dict[int, dict[PeerId, tuple[SlotId, ...]]] = {}
        self._mine: Ledger | None = None
        self._peers: tuple[PeerId, ...] = ()
        self._suspects: dict[PeerId, str] = {}
        self._changed = Signal()
        self.prepared_digest: str | None = None

    # --- messages --------------------------------------------------------------------------

    def on_close(self, close: StepClose, decision: Decision) -> None:
        """Take a data node's close, whoever passed it on."""
        if close.data_node not in decision.data_nodes:
            return
        if self._ledger.closes.get(close.data_node) == close:
            return  # it is said until the step ends
        check_close(close, self._ctx.swarm)
        if self._ledger.on_close(close, decision):
            self._changed.notify()

    def on_ledger(self, message: Ledger, sender: PeerId, decision: Decision) -> None:
        """Take a stage peer's ledger, also one of a term that this member has not seen yet.

        Of such terms one is kept of each sender.
        """
        stage = self._ctx.stage
        if message.stage != stage or sender not in decision.roster[stage]:
            return
        if message.term < decision.term:
            return
        for term in [t for t in self._ledgers if t > decision.term]:
            self._ledgers[term].pop(sender, None)
            if not self._ledgers[term]:
                del self._ledgers[term]
        slots = tuple((e.data_node, e.slot) for e in message.entries)
        self._ledgers.setdefault(message.term, {})[sender] = slots
        self._changed.notify()

    async def say_again(self) -> None:
        """A session may break under a ledger, so it is said until the averaging is done.

        A stage peer that stays silent may lack a close: it gets those that I have.
        """
        while True:
            await trio.sleep(REPEAT_S)
            mine, peers = self._mine, self._peers
            if mine is None:
                continue
            await self._ctx.send_all(peers, mine)
            silent = [p for p in peers if p not in self._ledgers.get(mine.term, {})]
            for close in self._ledger.closes.values():
                await self._ctx.send_all(silent, close)

    # --- the way to PREPARED ---------------------------------------------------------------

    async def run(self, decision: Decision) -> None:
        """Reconcile, average and prepare under one term; raise PeerError if that cannot be done.

        Whoever keeps the step from ending is then to be accused.
        """
        ctx = self._ctx
        self.prepared_digest, self._mine = None, None
        self._suspects.clear()
        self._ledgers = {t: of for t, of in self._ledgers.items() if t >= decision.term}
        await ctx.compute("update", ctx.state.abandon)
        await self._wait_for_closes(decision)
        expected = self._ledger.expected(decision)
        await self._settle(expected, decision)
        await ctx.faults.reach("in_reconcile", decision.step)
        held, missing = await self._reconcile(decision, expected)
        for slot in sorted(s for s, member in missing.items() if member == ctx.me):
            await self._repair.recompute(slot, expected[slot], decision)
        grace_s = ctx.deadlines.step_stall_s if missing else 0.0
        total = await self._average(decision, {**held, **missing}, grace_s)
        self._mine = None
        await self._prepare(decision, total, len(expected))

    async def accuse(self, decision: Decision, cause: str) -> None:
        """Tell the authorities, who alone decide, why ``run`` failed, until there is a new term.

        Without a suspect it names this member: a step that nobody reports would stay open.
        """
        suspects = dict(self._suspects) or {self._ctx.me: cause}
        while True:
            for peer in sorted(suspects):
                message = Suspect(
                    step=decision.step, term=decision.term, peer=peer, reason=suspects[peer][:200]
                )
                await self._ctx.tell_authorities(message)
            await trio.sleep(REPEAT_S)

    async def _wait_for_closes(self, decision: Decision) -> None:
        """However long the step takes, as long as microbatches keep coming."""
        started_at = trio.current_time()
        while self._ledger.missing_closes(decision):
            with trio.move_on_after(self._ctx.deadlines.step_stall_s / 4):
                await self._changed.until(lambda: not self._ledger.missing_closes(decision))
            silent = self._fell_silent(decision, started_at)
            if silent:
                self._suspect(silent, "no STEP_CLOSE")
                raise PeerTimeout("a data node did not close the step")

    def _fell_silent(self, decision: Decision, started_at: float) -> set[PeerId]:
        """Data nodes that have not closed and send nothing any more; their holders see that."""
        if not isinstance(self._flow, HolderFlow):
            return set()
        heard_at, limit_s = self._flow.heard_at, self._ctx.deadlines.step_stall_s
        return {
            peer
            for peer in self._ledger.missing_closes(decision)
            if trio.current_time() - max(started_at, heard_at.get(peer, 0.0)) >= limit_s
        }

    async def _settle(self, expected: Mapping[SlotId, Entry], decision: Decision) -> None:
        """COMMITs that were lost on the way: the closes say the same."""
        wrong = self._ledger.unexpected(expected, decision)
        if wrong:
            self._suspect({peer for peer, _ in wrong}, "COMMIT outside its close")
            raise ProtocolViolation("a data node committed what its STEP_CLOSE does not list")
        if isinstance(self._flow, HolderFlow):
            for work in self._ledger.unsettled(expected):
                await self._flow.commit(work)

    async def _reconcile(
        self, decision: Decision, expected: Mapping[SlotId, Entry]
    ) -> tuple[dict[SlotId, PeerId], dict[SlotId, PeerId]]:
        """Exchange ledgers with the stage: who holds each slot, and who recomputes the missing."""
        ctx = self._ctx
        members = decision.roster[ctx.stage]
        entries = self._ledger.entries(expected)
        ledgers = self._ledgers.setdefault(decision.term, {})
        ledgers[ctx.me] = tuple((e.data_node, e.slot) for e in entries)
        self._mine = Ledger(
            step=decision.step, term=decision.term, stage=ctx.stage, entries=entries
        )
        self._peers = members
        await self._exchange_ledgers(decision, self._mine)
        agreed = {m: [s for s in ledgers[m] if s in expected] for m in members}
        if any(ctx.me in owners[1:] for owners in duplicates(agreed).values()):
            self._suspect({ctx.me}, "holds a duplicate")
            raise ProtocolViolation("my sums hold what another holder has too")
        missing = assignments(expected, agreed)
        if missing and ctx.stage == 0:  # a data node's own gradients: nobody else can have them
            self._suspect({peer for peer, _ in missing}, "lost its own sums")
            raise ProtocolViolation("a data node lost what it committed")
        return {slot: m for m in members for slot in agreed[m]}, missing

    async def _exchange_ledgers(self, decision: Decision, mine: Ledger) -> None:
        ctx = self._ctx
        members = set(decision.roster[ctx.stage])
        ledgers = self._ledgers[decision.term]
        with trio.move_on_after(ctx.deadlines.request_s) as deadline:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ctx.send_all, decision.roster[ctx.stage], mine)
                await self._changed.until(lambda: members <= ledgers.keys())
        if deadline.cancelled_caught:
            self._suspect(members - ledgers.keys(), "no LEDGER")
            raise PeerTimeout("a holder of this stage did not send its ledger")

    async def _average(
        self, decision: Decision, holder_of: Mapping[SlotId, PeerId], grace_s: float
    ) -> Tensor:
        """Add up what the stage's members hold of all that counts."""
        ctx = self._ctx
        members = decision.roster[ctx.stage]
        round_ = Round(decision.step, decision.term, 0, ctx.stage, members, grace_s)
        add_up = self._total_by_slot if ctx.sums_by_slot else self._total
        try:
            total, total_count = await add_up(round_, decision, holder_of)
        except AveragingFailed as error:
            self._suspect(map(PeerId, error.missing), "averaging")
            raise
        if total_count != len(holder_of):
            raise ProtocolViolation(f"averaged {total_count} of {len(holder_of)} microbatches")
        return total

    async def _total(
        self, round_: Round, decision: Decision, holder_of: Mapping[SlotId, PeerId]
    ) -> tuple[Tensor, int]:
        ctx = self._ctx
        groups = drawing_nodes(decision)
        gradient = await ctx.compute("update", lambda: ctx.state.gradient(groups))
        count = sum(slot in self._ledger.committed for slot in holder_of)
        await ctx.faults.reach("in_reduce", decision.step)
        with self._timed():
            return await ctx.averager.total(round_, gradient, count)

    async def _total_by_slot(
        self, round_: Round, decision: Decision, holder_of: Mapping[SlotId, PeerId]
    ) -> tuple[Tensor, int]:
        ctx = self._ctx
        order = sorted(holder_of, key=lambda slot: (slot[1], slot[0]))
        mine = [slot for slot in order if holder_of[slot] == ctx.me]
        gradients = await ctx.compute("update", lambda: ctx.state.gradients(mine))
        await ctx.faults.reach("in_reduce", decision.step)
        round_ = replace(round_, sources=tuple(holder_of[slot] for slot in order))
        with self._timed():
            return await ctx.ordered_averager.total_in_order(
                round_, gradients, ctx.state.num_gradients
            )

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = trio.current_time()
        yield
        self._ctx.observer.count("seconds", trio.current_time() - started, phase="averaging")

    async def _prepare(self, decision: Decision, total: Tensor, num_microbatches: int) -> None:
        ctx = self._ctx
        digest = await ctx.compute("update", lambda: ctx.state.prepare(total, num_microbatches))
        await ctx.keep_prepared(decision)
        self.prepared_digest = digest
        message = Prepared(step=decision.step, term=decision.term, stage=ctx.stage, digest=digest)
        await ctx.tell_authorities(message)
        await ctx.faults.reach("after_prepared", decision.step)
        while True:  # until the next decision: the word may have been lost with a session
            await trio.sleep(REPEAT_S)
            await ctx.tell_authorities(message)

    def _suspect(self, peers: Iterable[PeerId], reason: str) -> None:
        self._suspects |= dict.fromkeys(peers, reason)
