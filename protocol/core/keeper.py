"""When a node writes its stage's state to disk, and how it finds it again.

A state that nobody else can have is on disk before the node says PREPARED, for that word is a
promise: the swarm may go on from the state at once. So it is for the only holder of a stage, and
for every holder with ``every`` 1. Otherwise every so many steps are written beside the work.
Whoever is stopped cleanly writes what it holds and what it has prepared, so a swarm that was
stopped as a whole finds the decided state of every stage again.
"""

from __future__ import annotations

import trio

from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.errors import NumericsError, ResourceError, ShoalError, StateMismatch
from protocol.messages import Decision
from protocol.ports import Snapshots, Tensor


class Keeper:
    """Saves and loads the states of one node's stage; with ``every`` 0 it saves none."""

    def __init__(self, ctx: Context, store: Snapshots, every: int) -> None:
        self._ctx, self._store, self._every = ctx, store, every
        self._is_alone = False
        self._tried = ""  # the digest of the last try: a full disk is not tried twice a step
        self._told = ""
        self._changed = Signal()
        self._lock = trio.Lock()

    # --- saving ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Save what is due beside the work, until cancelled."""
        while True:
            await self._changed.until(self._is_due)
            self._tried = self._ctx.state.digest
            await self._save(is_prepared=False)

    def on_state(self, decision: Decision | None) -> None:
        """The stage's state is another one now, or the roster is."""
        if decision is not None:
            self._is_alone = decision.roster[self._ctx.stage] == (self._ctx.me,)
        self._changed.notify()

    async def keep_prepared(self, decision: Decision) -> None:
        """Return when the prepared state may be promised."""
        self.on_state(decision)
        if self._must_last:
            await self._save(is_prepared=True)

    async def save_all(self) -> None:
        """The node is stopped: save what it holds and what it has prepared."""
        if self._every:
            await self._save(is_prepared=False)
            await self._save(is_prepared=True)

    @property
    def _must_last(self) -> bool:
        return self._every == 1 or (self._every > 0 and self._is_alone)

    def _is_due(self) -> bool:
        state, store = self._ctx.state, self._store
        if not state.step or store.is_decided(state.digest) or state.digest == self._tried:
            return False  # that of step 0 is a function of the seed
        is_turn = self._every > 0 and state.step % self._every == 0
        return is_turn or self._must_last or store.holds(state.digest)

    async def _save(self, *, is_prepared: bool) -> None:
        """A disk that is full or too slow costs the snapshot and nothing else."""
        ctx, store = self._ctx, self._store
        async with self._lock:
            view = await ctx.compute("state", lambda: ctx.state.view_state(is_prepared=is_prepared))
            if view is None or view[0] == 0:
                return
            step, digest, _ = view
            try:
                if not store.holds(digest):
                    await store.save(ctx.stage, view, is_decided=not is_prepared)
                elif not is_prepared:
                    await store.decide(digest)
            except (ResourceError, StateMismatch) as error:
                self._tell("snapshot_not_saved", error)
            else:
                self._told = ""
                ctx.observer.event("snapshot_saved", step=step, stage=ctx.stage)

    # --- loading ---------------------------------------------------------------------------

    async def load_newest(self) -> None:
        """Begin with the latest decided state that is there and whole, if there is one."""
        for _, digest in self.kept():
            if await self.load(digest):
                return

    def kept(self) -> tuple[tuple[int, str], ...]:
        """Step and digest of the decided states on the disk, the newest first."""
        return tuple(self._store.decided(self._ctx.stage))

    async def load(self, digest: str) -> bool:
        """Take over the state with this digest, if the disk has it; set aside what is damaged."""
        if not self._store.holds(digest):
            return False
        try:
            data = await self._store.load(digest)
            if data is not None:
                await self._take(data, digest)
                return True
        except (ResourceError, NumericsError) as error:
            self._tell("snapshot_damaged", error)
        await self._store.set_aside(digest)
        return False

    async def _take(self, data: Tensor, digest: str) -> None:
        ctx = self._ctx
        await ctx.compute("state", lambda: ctx.state.import_state(data, digest))
        ctx.origin = f"this disk, at step {ctx.state.step}"
        ctx.observer.event("snapshot_loaded", step=ctx.state.step, stage=ctx.stage)

    def _tell(self, name: str, error: ShoalError) -> None:
        """Count every failure; say it once until the disk works again."""
        self._ctx.observer.count("errors", code=error.code)
        if error.cause != self._told:
            self._told = error.cause
            self._ctx.observer.event(name, code=error.code, cause=error.cause, hint=error.hint)
