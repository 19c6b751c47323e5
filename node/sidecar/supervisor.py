"""Keeps a side-car running: starts it, watches it, restarts it, and tells who can be called."""

from __future__ import annotations

import random
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import trio

from node.sidecar import channel
from node.sidecar.link import Link
from node.sidecar.peer_cache import PeerCache
from node.sidecar.sweep import make_folder, sweep
from protocol.deadlines import Deadlines
from protocol.errors import SidecarError, Unreachable
from protocol.keys import NodeKey, PeerId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from protocol.ports import Observer

R = TypeVar("R", bound=channel.Packet)

_BACKOFF_FIRST_S = 0.2
_BACKOFF_LAST_S = 20.0
# A side-car that lived this long begins again at the first back-off.
_SETTLED_S = 30.0
_JOIN_POLL_S, _LAST_JOIN_POLL_S = 0.1, 1.0


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """``listen``, ``announce`` and ``bootstrap`` are multiaddrs, the last with /p2p/ID.

    ``peer_cache`` is a file of the node's state folder; ``maps_port`` asks the router by UPnP.
    """

    swarm: str
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    maps_port: bool = True
    peer_cache: Path | None = None


class Sidecar:
    """The side-car of one node. ``run`` owns it; everything else may be called while it runs."""

    def __init__(
        self,
        key: NodeKey,
        options: SidecarOptions,
        deadlines: Deadlines,
        observer: Observer,
        rng: random.Random,
    ) -> None:
        self._key = key.derive("sidecar")
        self._options, self._deadlines = options, deadlines
        self._observer, self._rng = observer, rng
        self._cache = PeerCache(options.peer_cache)
        self._listen = options.listen
        self._link: Link | None = None
        self._is_up = trio.Event()
        self._doubt: str | None = None
        self._doubted = trio.Event()
        self._pong: channel.Pong | None = None
        self.after_restart: Callable[[], Awaitable[None]] | None = None

    @property
    def peer_id(self) -> PeerId:
        """The side-car's PeerID, for the node's record."""
        return self._key.peer_id

    @property
    def pid(self) -> int | None:
        """The process id of the side-car that is up, if any."""
        return self._link.pid if self._link else None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs for invites and bootstrap lists; empty before the first start."""
        return self._pong.addresses if self._pong else ()

    @property
    def num_neighbours(self) -> int:
        """How many other side-cars it knows; 0 means alone."""
        return self._pong.num_neighbours if self._pong else 0

    async def call(self, request: channel.Packet, reply: type[R]) -> R:
        """Return the reply within ``sidecar_call_s``, waiting for a restart if need be.

        Raises SidecarError: the request failed, the side-car died meanwhile, or time is up.
        """
        limit_s = self._deadlines.sidecar_call_s
        with trio.move_on_after(limit_s):
            await self._is_up.wait()
            assert self._link is not None
            return await self._link.call(request, reply)
        what = type(request).__name__
        raise SidecarError(f"the side-car did not answer {what} within {limit_s:g} s")

    async def wait_joined(self, limit_s: float) -> None:
        """Return when another side-car is known; raise Unreachable after ``limit_s``."""
        pause_s = _JOIN_POLL_S
        with trio.move_on_after(limit_s):
            while True:
                self._learn(await self.call(channel.Ping(), channel.Pong))
                if self.num_neighbours:
                    return
                await trio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LAST_JOIN_POLL_S)
        seeds = ", ".join(self._options.bootstrap) or "none was given"
        raise Unreachable(f"no seed of the swarm answered ({seeds})")

    def restart(self, reason: str) -> None:
        """Replace the side-car: others do not see what it claims to have stored."""
        self._doubt = reason
        self._doubted.set()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a side-car up until cancelled; raise SidecarError if the first does not start."""
        sweep()
        backoff_s, num_lives = _BACKOFF_FIRST_S, 0
        while True:
            began = trio.current_time()
            cause, was_up = await self._live(task_status if not num_lives else None)
            if not num_lives and not was_up:
                raise SidecarError(cause)
            num_lives += 1
            if trio.current_time() - began > _SETTLED_S:
                backoff_s = _BACKOFF_FIRST_S
            if not was_up:
                # The port of the last life may be taken by now.
                self._listen = self._options.listen
            self._observer.count("sidecar_restarts")
            self._observer.event("sidecar_restarted", cause=cause)
            await trio.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
            backoff_s = min(2 * backoff_s, _BACKOFF_LAST_S)

    async def _live(self, task_status: TaskStatus[None] | None) -> tuple[str, bool]:
        """Run one side-car to its end; return why it ended and whether it was ever up."""
        folder = make_folder()
        try:
            link = await Link.open()
        except OSError as error:
            return f"the side-car could not be started: {error}", False
        else:
            return await self._run(link, folder, task_status)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(
        self, link: Link, folder: str, task_status: TaskStatus[None] | None
    ) -> tuple[str, bool]:
        causes: list[str] = []
        was_up = False

        async def carry() -> None:
            causes.append(await link.run())
            nursery.cancel_scope.cancel()

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(carry)
                try:
                    await self._start(link, folder)
                    was_up = True
                    if task_status:
                        task_status.started()
                    elif self.after_restart:
                        nursery.start_soon(self.after_restart)
                    await self._watch()
                except SidecarError as error:
                    causes.insert(0, error.cause)
                nursery.cancel_scope.cancel()
        finally:
            self._go_down()
            await link.close()
        return causes[0], was_up

    async def _start(self, link: Link, folder: str) -> None:
        own = f"/p2p/{self.peer_id}"
        known = (*self._options.bootstrap, *self._cache.addresses)
        limit_s = self._deadlines.sidecar_start_s
        request = channel.Start(
            swarm=self._options.swarm,
            key=self._key.to_bytes(),
            listen=self._listen,
            announce=self._options.announce,
            bootstrap=tuple(dict.fromkeys(a for a in known if not a.endswith(own))),
            maps_port=self._options.maps_port,
            folder=folder,
            start_s=limit_s,
            dial_s=self._deadlines.dial_s,
        )
        with trio.move_on_after(limit_s):
            self._learn(await link.call(request, channel.Pong))
            self._listen = self._bound(self.addresses)
            self._link = link
            self._is_up.set()
            self._observer.gauge("sidecar_up", 1)
            return
        raise SidecarError(f"the side-car was not up within {limit_s:g} s")

    def _bound(self, addresses: tuple[str, ...]) -> tuple[str, ...]:
        """Return the listen addresses with the port that was got, so that invites stay true."""
        if self._options.announce or not addresses:
            return self._listen
        port = addresses[0].split("/")[4]
        return tuple(
            f"{a.removesuffix('/tcp/0')}/tcp/{port}" if a.endswith("/tcp/0") else a
            for a in self._listen
        )

    async def _watch(self) -> None:
        """Ping until that fails or somebody doubts the side-car; then raise SidecarError."""
        self._doubted = trio.Event()
        while True:
            self._learn(await self.call(channel.Ping(), channel.Pong))
            with trio.move_on_after(self._deadlines.sidecar_probe_s):
                await self._doubted.wait()
                raise SidecarError(f"the side-car was replaced: {self._doubt}")

    def _learn(self, pong: channel.Pong) -> None:
        self._pong = pong
        self._cache.remember(pong.peers)

    def _go_down(self) -> None:
        self._link = None
        if self._is_up.is_set():  # else somebody may wait for this very event
            self._is_up = trio.Event()
        self._observer.gauge("sidecar_up", 0)
