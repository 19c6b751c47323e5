"""The end of a step at one member: reconcile, recompute what is missing, average, prepare.

Runs once per term; a new term of the same step starts it again, and what the sums hold stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
from protocol.step.ledger import SlotId, StepLedger, assignments, duplicates

PASS_ON_AFTER_S = 1.0
REPEAT_S = 2.0


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
        self._changed = Signal()
        self.prepared_digest: str | None = None

    # --- messages --------------------------------------------------------------------------

    def on_close(self, close: StepClose) -> None:
        """Take a data node's close, whoever passed it on."""
        check_close(close, self._ctx.swarm)
        if self._ledger.on_close(close):
            self._changed.notify()

    def on_ledger(self, message: Ledger, sender: PeerId) -> None:
        """Take a stage peer's ledger, also one of a term that this member has not seen yet."""
        if message.stage != self._ctx.stage:
            return
        slots = tuple((e.data_node, e.slot) for e in message.entries)
        self._ledgers.setdefault(message.term, {})[sender] = slots
        self._changed.notify()

    # --- the way to PREPARED ---------------------------------------------------------------

    async def run(self, decision: Decision) -> None:
        """Reconcile, average and prepare under one term. Raises PeerTimeout if peers stay silent.

        Whoever keeps the step from ending is reported to the authorities, who alone decide.
        """
        ctx = self._ctx
        self.prepared_digest = None
        await ctx.compute("update", ctx.state.abandon)
        await self._wait_for_closes(decision)
        expected = self._ledger.expected(decision)
        await self._settle(expected, decision)
        await ctx.faults.reach("in_reconcile", decision.step)
        for slot in await self._reconcile(decision, expected):
            await self._repair.recompute(slot, expected[slot], decision)
        total = await self._average(decision, expected)
        await self._prepare(decision, total, len(expected))

    async def _wait_for_closes(self, decision: Decision) -> None:
        with trio.move_on_after(self._ctx.deadlines.step_stall_s) as scope:
            await self._changed.until(lambda: not self._ledger.missing_closes(decision))
        if scope.cancelled_caught:
            await self._suspect(decision, self._ledger.missing_closes(decision), "no STEP_CLOSE")
            raise PeerTimeout("a data node did not close the step")

    async def _settle(self, expected: Mapping[SlotId, Entry], decision: Decision) -> None:
        """COMMITs that were lost on the way: the closes say the same."""
        wrong = self._ledger.unexpected(expected, decision)
        if wrong:
            await self._suspect(decision, {peer for peer, _ in wrong}, "COMMIT outside its close")
            raise ProtocolViolation("a data node committed what its STEP_CLOSE does not list")
        if isinstance(self._flow, HolderFlow):
            for work in self._ledger.unsettled(expected):
                await self._flow.commit(work)

    async def _reconcile(
        self, decision: Decision, expected: Mapping[SlotId, Entry]
    ) -> list[SlotId]:
        """Exchange ledgers with the stage; return the missing slots that fall to me."""
        ctx = self._ctx
        members = decision.roster[ctx.stage]
        entries = self._ledger.entries(expected)
        ledgers = self._ledgers.setdefault(decision.term, {})
        ledgers[ctx.me] = tuple((e.data_node, e.slot) for e in entries)
        await self._exchange_ledgers(
            decision,
            Ledger(step=decision.step, term=decision.term, stage=ctx.stage, entries=entries),
        )
        agreed = {m: [s for s in ledgers[m] if s in expected] for m in members}
        if any(ctx.me in owners[1:] for owners in duplicates(agreed).values()):
            await self._suspect(decision, {ctx.me}, "holds a duplicate")
            raise ProtocolViolation("my sums hold what another holder has too")
        return sorted(s for s, m in assignments(expected, agreed).items() if m == ctx.me)

    async def _exchange_ledgers(self, decision: Decision, mine: Ledger) -> None:
        ctx = self._ctx
        members = set(decision.roster[ctx.stage])
        ledgers = self._ledgers[decision.term]
        with trio.move_on_after(ctx.deadlines.request_s) as deadline:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ctx.send_all, members, mine)
                passing_on = trio.CancelScope()
                nursery.start_soon(self._pass_closes_on, decision, passing_on)
                await self._changed.until(lambda: members <= ledgers.keys())
                passing_on.cancel()
        if deadline.cancelled_caught:
            await self._suspect(decision, members - ledgers.keys(), "no LEDGER")
            raise PeerTimeout("a holder of this stage did not send its ledger")

    async def _pass_closes_on(self, decision: Decision, scope: trio.CancelScope) -> None:
        """A stage peer that stays silent may lack a close: hand it what I have."""
        with scope:
            while True:
                await trio.sleep(PASS_ON_AFTER_S)
                have = self._ledgers[decision.term]
                silent = [p for p in decision.roster[self._ctx.stage] if p not in have]
                for close in self._ledger.closes.values():
                    await self._ctx.send_all(silent, close)

    async def _average(self, decision: Decision, expected: Mapping[SlotId, Entry]) -> Tensor:
        ctx = self._ctx
        groups = decision.data_nodes
        gradient = await ctx.compute("update", lambda: ctx.state.gradient(groups))
        count = len(self._ledger.entries(expected))
        await ctx.faults.reach("in_reduce", decision.step)
        members = decision.roster[ctx.stage]
        round_ = Round(decision.step, decision.term, 0, ctx.stage, members)
        started = trio.current_time()
        try:
            total, total_count = await ctx.averager.total(round_, gradient, count)
        except AveragingFailed as error:
            await self._suspect(decision, map(PeerId, error.missing), "averaging")
            raise
        ctx.observer.count("seconds", trio.current_time() - started, phase="averaging")
        if total_count != len(expected):
            raise ProtocolViolation(f"averaged {total_count} of {len(expected)} microbatches")
        return total

    async def _prepare(self, decision: Decision, total: Tensor, num_microbatches: int) -> None:
        ctx = self._ctx
        digest = await ctx.compute("update", lambda: ctx.state.prepare(total, num_microbatches))
        self.prepared_digest = digest
        message = Prepared(step=decision.step, term=decision.term, stage=ctx.stage, digest=digest)
        await ctx.tell_authorities(message)
        await ctx.faults.reach("after_prepared", decision.step)
        while True:  # until the next decision: the word may have been lost with a session
            await trio.sleep(REPEAT_S)
            await ctx.tell_authorities(message)

    async def _suspect(self, decision: Decision, peers: Iterable[PeerId], reason: str) -> None:
        for peer in sorted(peers):
            message = Suspect(step=decision.step, term=decision.term, peer=peer, reason=reason)
            await self._ctx.tell_authorities(message)
