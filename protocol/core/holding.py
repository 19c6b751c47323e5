"""The stage that a node serves: its state, and the ways on which states come and go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from protocol.core.context import Context
from protocol.core.keeper import Keeper
from protocol.core.member_step import MemberStep
from protocol.core.rebuilding import rebuild
from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.core.sync import StateSync
from protocol.core.transfer import Donor, Joiner
from protocol.errors import StateMismatch
from protocol.messages import Decision
from protocol.ports import Snapshots


class Holding:
    """``is_wanted`` tells whether a decision's state is still worth fetching."""

    def __init__(
        self,
        ctx: Context,
        snapshots: Snapshots,
        settings: NodeSettings,
        changed: Signal,
        is_wanted: Callable[[Decision], bool],
    ) -> None:
        self.ctx = ctx
        self.lacks: str | None = None  # the decided state that is not on this node's disk
        self.donor, self.joiner = Donor(ctx, settings.state_bytes_per_s), Joiner(ctx)
        self.sync = StateSync(self.joiner, ctx.observer, ctx.rng, changed, is_wanted)
        self.keeper = Keeper(ctx, snapshots, settings.snapshot_steps)
        self.is_rebuilding = False
        self._rebuilt_for: tuple[int, str] | None = None
        ctx.keep_prepared = self.keeper.keep_prepared

    def has_state_of(self, decision: Decision) -> bool:
        """Whether this node holds the state at the start of ``decision``."""
        state = self.ctx.state
        return (state.step, state.digest) == (decision.step, decision.digests[self.ctx.stage])

    @property
    def is_rebuilt(self) -> bool:
        """Whether the state is one that this node rebuilt and nobody has decided on."""
        return self._rebuilt_for is not None

    def has_some_state_of(self, decision: Decision) -> bool:
        """Whether there is nothing to do but wait: it has the state, or what it made instead."""
        lost = decision.step, decision.digests[self.ctx.stage]
        return self.has_state_of(decision) or self._rebuilt_for == lost

    def on_decision(self, decision: Decision) -> None:
        """A decision came: perhaps it names what this node rebuilt."""
        if self.has_state_of(decision):
            self._rebuilt_for = None
        if not self.is_rebuilt:
            self.keeper.on_state(decision)

    async def save(self) -> None:
        """The node is being stopped: write to disk what the swarm may go on from."""
        if not self.is_rebuilt:
            await self.keeper.save_all()

    async def end_step(self, member: MemberStep, decision: Decision, *, is_leaving: bool) -> bool:
        """Apply what the member prepared if that is decided, else drop it; return which."""
        ctx = self.ctx
        finished = decision.step == member.decision.step + 1
        is_applied = finished and member.prepared_digest == decision.digests[ctx.stage]
        self.donor.forget()
        self._rebuilt_for = None
        if is_applied:
            await ctx.faults.reach("before_apply", member.decision.step)
            await ctx.compute("update", ctx.state.apply)
            await ctx.faults.reach("after_apply", member.decision.step)
        else:
            if is_leaving:  # what is prepared may be decided on yet
                await self.keeper.save_all()
            await ctx.compute("update", ctx.state.reset)
        self.keeper.on_state(decision)
        return is_applied

    def _tell_if_lost(self, decision: Decision) -> None:
        """Nobody else has the state of whoever is alone in its stage."""
        ctx, stage = self.ctx, self.ctx.stage
        if decision.roster[stage] != (ctx.me,):
            return
        name = f"snapshots/stage-{stage}-step-{decision.step}-{decision.digests[stage]}"
        ctx.observer.event(
            "state_lost", code=StateMismatch.code,
            cause=f"this node is the only holder of stage {stage} and its disk has no whole state"
            f" of step {decision.step}; the swarm waits for it, or goes back to an older one",
            hint=f"Stop the node, put {name}.safetensors (or .prepared) of a copy of its state"
            " directory in place and start it again; or start another holder that has it.",
        )  # fmt: skip

    async def take_state(
        self, decision: Decision, before_fetch: Callable[[], None], lost: Sequence[int] = ()
    ) -> None:
        """Get the decided state from the disk, or else from another holder of the stage.

        With this stage among the ``lost`` ones, make it out of those of the stages around it.
        """
        self._rebuilt_for = None
        digest = decision.digests[self.ctx.stage]
        if not await self.keeper.load(digest):
            self.lacks = digest
            before_fetch()
            if self.ctx.stage in lost:
                return await self._rebuild(decision, lost)
            self._tell_if_lost(decision)
            await self.sync.run(decision)
            self.lacks = None
        return self.keeper.on_state(decision)

    async def _rebuild(self, decision: Decision, lost: Sequence[int]) -> None:
        """What comes of it is written to disk once it is decided on."""

        async def get(decision: Decision) -> None:
            await rebuild(self.ctx, self.joiner, decision, lost)
            self._rebuilt_for = decision.step, decision.digests[self.ctx.stage]

        self.is_rebuilding = True
        try:
            await self.sync.run(decision, get)
        finally:
            self.is_rebuilding = False


async def keep(changed: Signal, current: Callable[[], Holding | None]) -> None:
    """Run the keeper of whatever is held now, until cancelled."""
    while True:
        await changed.until(lambda: current() is not None)
        holding = current()
        assert holding is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(holding.keeper.run)
            await _until_gone(changed, current, holding)
            nursery.cancel_scope.cancel()


async def _until_gone(
    changed: Signal, current: Callable[[], Holding | None], holding: Holding
) -> None:
    await changed.until(lambda: current() is not holding)
