"""hivemind's averager as a GroupReducer: its process, kept running, and the buffer shared with it.

A reducer that failed is replaced, not repaired: what is left in it of a broken round is gone then,
and other members see by its new address that it is another one.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import trio

from node.sidecar import channel
from node.sidecar.link import Link
from node.sidecar.shared_buffer import SharedBuffer
from node.sidecar.sweep import make_folder, sweep
from protocol.deadlines import Deadlines
from protocol.errors import SidecarError
from protocol.ports import Observer

PROGRAM = "node.sidecar.child.averager"
_BACKOFF_FIRST_S, _BACKOFF_LAST_S = 0.2, 20.0


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """``listen`` holds multiaddrs; ``maps_port`` asks the router by UPnP."""

    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    maps_port: bool = True


class HivemindReducer:
    """Implements GroupReducer. ``run`` owns the process and must run all the while."""

    def __init__(
        self, options: ReducerOptions, deadlines: Deadlines, observer: Observer, rng: random.Random
    ) -> None:
        self._options, self._deadlines = options, deadlines
        self._observer, self._rng = observer, rng
        self._link: Link | None = None
        self._addresses: tuple[str, ...] = ()
        self._is_wanted = trio.Event()
        self._is_up = trio.Event()
        self._is_unwanted = trio.Event()
        self._buffer: SharedBuffer | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the averager that is up, if any."""
        return self._link.pid if self._link else None

    async def run(self) -> None:
        """Keep an averager up until cancelled, once somebody has asked for it.

        A lone holder of a stage never does, and is spared some hundred MB.
        """
        sweep()
        await self._is_wanted.wait()
        backoff_s = _BACKOFF_FIRST_S
        try:
            while True:
                cause = await self._live()
                if cause is None:
                    backoff_s = _BACKOFF_FIRST_S
                    continue
                self._observer.event("averager_restarted", cause=cause)
                await trio.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
                backoff_s = min(2 * backoff_s, _BACKOFF_LAST_S)
        finally:
            if self._buffer is not None:
                self._buffer.close()

    # --- the reducer -----------------------------------------------------------------------

    async def ready(self) -> tuple[str, ...]:
        """Return where other members' averagers reach this one, once it is up."""
        self._is_wanted.set()
        while self._link is None:
            await self._is_up.wait()
        return self._addresses

    async def reduce(
        self, values: torch.Tensor, group: str, peers: Sequence[str], num_members: int
    ) -> None:
        """Replace ``values`` by what hivemind takes for the group's mean; SidecarError if none.

        Whoever cancels it must call ``renew``: the round may still be under way.
        """
        link = self._link
        if link is None:
            raise SidecarError("the averager is gone")
        flat, limits = values.view(-1), self._deadlines
        buffer = self._shared(len(flat))
        await trio.to_thread.run_sync(buffer.tensor.copy_, flat)
        request = channel.Average(
            buffer=str(buffer.path), num_elements=len(flat), group=group, peers=tuple(peers),
            num_members=num_members, matchmaking_s=limits.matchmaking_s,
            allreduce_s=limits.allreduce_s, silence_s=limits.session_silence_s,
        )  # fmt: skip
        # a round ends by itself within these two; a frozen averager does not
        limit_s = limits.matchmaking_s + limits.allreduce_s + limits.heartbeat_s
        with trio.move_on_after(limit_s):
            await link.call(request, channel.Averaged)
            await trio.to_thread.run_sync(flat.copy_, buffer.tensor)
            return
        raise SidecarError(f"the averager did not end a round within {limit_s:g} s")

    def renew(self) -> None:
        """Replace the averager that is up; one that is being started knows of no round."""
        if self._link is not None:
            self._go_down()
            self._is_unwanted.set()

    def _shared(self, num_elements: int) -> SharedBuffer:
        if self._buffer is not None and len(self._buffer.tensor) != num_elements:
            self._buffer.close()
            self._buffer = None
        if self._buffer is None:
            self._buffer = SharedBuffer(num_elements)
        return self._buffer

    # --- its process -----------------------------------------------------------------------

    async def _live(self) -> str | None:
        """Run one averager to its end; return why it ended, None if it was renewed."""
        self._is_unwanted = trio.Event()
        folder = make_folder()
        try:
            link = await Link.open(PROGRAM)
        except OSError as error:
            return f"the averager could not be started: {error}"
        else:
            return await self._run(link, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, link: Link, folder: str) -> str | None:
        causes: list[str | None] = []

        async def carry() -> None:
            causes.append(await link.run())
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carry)
                try:
                    await self._start(link, folder)
                    await self._is_unwanted.wait()
                    causes.append(None)
                except SidecarError as error:
                    causes.insert(0, error.cause)
                nursery.cancel_scope.cancel()
        finally:
            self._go_down()
            await link.close()
        return causes[0]

    async def _start(self, link: Link, folder: str) -> None:
        limit_s = self._deadlines.sidecar_start_s
        request = channel.StartAverager(
            folder=folder, listen=self._options.listen, maps_port=self._options.maps_port,
            start_s=limit_s,
        )  # fmt: skip
        with trio.move_on_after(limit_s):
            self._addresses = (await link.call(request, channel.AveragerUp)).addresses
            self._link = link
            self._is_up.set()
            return
        raise SidecarError(f"the averager was not up within {limit_s:g} s")

    def _go_down(self) -> None:
        self._link = None
        if self._is_up.is_set():  # else somebody may wait for this very event
            self._is_up = trio.Event()
