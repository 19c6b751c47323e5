"""State synchronisation: fetch the decided state until this node holds it or it is out of date."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import trio

from protocol.core.signal import Signal
from protocol.core.transfer import Joiner
from protocol.errors import PeerError
from protocol.messages import Decision
from protocol.ports import Observer

PAUSE_S = 0.2
PAUSE_LIMIT_S = 5.0


class StateSync:
    """``is_wanted`` tells whether a decision's state is still worth fetching."""

    def __init__(
        self,
        joiner: Joiner,
        observer: Observer,
        rng: random.Random,
        changed: Signal,
        is_wanted: Callable[[Decision], bool],
    ) -> None:
        self._joiner, self._observer, self._rng = joiner, observer, rng
        self._changed, self._is_wanted = changed, is_wanted
        self.is_running = False
        self.num_runs = 0  # since the node last worked

    async def run(
        self, decision: Decision, get: Callable[[Decision], Awaitable[None]] | None = None
    ) -> None:
        """Get the state at the start of ``decision``; give up when the swarm has moved on.

        From other holders of the stage, or however ``get`` does it.
        """
        self.is_running = True
        self.num_runs += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._give_up_when_stale, decision, nursery.cancel_scope)
                await self._with_pauses(decision, get or self._fetch)
                nursery.cancel_scope.cancel()
        finally:
            self.is_running = False

    async def _fetch(self, decision: Decision) -> None:
        await self._joiner.fetch(decision)
        self._observer.event("state_transferred", step=decision.step)

    async def _with_pauses(
        self, decision: Decision, get: Callable[[Decision], Awaitable[None]]
    ) -> None:
        """Ask the holders again after a pause that doubles; never a hot loop."""
        pause_s = PAUSE_S
        while True:
            try:
                await get(decision)
            except PeerError as error:
                self._observer.count("errors", code=error.code)
                self._observer.event("state_transfer_failed", cause=error.cause)
            else:
                return
            await trio.sleep(pause_s * (1 + self._rng.random()))
            pause_s = min(pause_s * 2, PAUSE_LIMIT_S)

    async def _give_up_when_stale(self, decision: Decision, scope: trio.CancelScope) -> None:
        await self._changed.until(lambda: not self._is_wanted(decision))
        scope.cancel()
