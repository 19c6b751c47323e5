"""Sending for code that must not wait: pure rules and message handlers post, a task delivers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import trio

from protocol.core.signal import Signal
from protocol.errors import PeerError
from protocol.keys import PeerId
from protocol.messages import Message
from protocol.ports import Network, Observer

CAPACITY = 4096
# Posts to one peer that are not acknowledged: it may ask and ask, and never take an answer.
OPEN_PER_PEER = 32


class Postbox:
    """Soft state only: what is posted here is said again by its sender if it is lost."""

    def __init__(self, network: Network, observer: Observer) -> None:
        self._network, self._observer = network, observer
        self._posts, self._posted = trio.open_memory_channel[tuple[tuple[PeerId, ...], Message]](
            CAPACITY
        )
        self._open: Counter[PeerId] = Counter()
        self._changed = Signal()

    def post(self, peers: Iterable[PeerId], message: Message) -> None:
        """Send to each of these peers but this node itself, and those that take nothing."""
        others = tuple(peer for peer in peers if peer != self._network.peer_id)
        ready = tuple(peer for peer in others if self._open[peer] < OPEN_PER_PEER)
        try:
            self._posts.send_nowait((ready, message))
        except trio.WouldBlock:
            ready = ()
        self._open.update(ready)
        if len(ready) < len(others):
            self._observer.count("errors", code="resource")

    async def flush(self) -> None:
        """Return when everything posted so far was delivered or failed."""
        await self._changed.until(lambda: not self._open)

    async def run(self) -> None:
        """Deliver until cancelled; a task for each peer, so that none waits for another."""
        async with trio.open_nursery() as nursery:
            async for peers, message in self._posted:
                for peer in peers:
                    nursery.start_soon(self._send, peer, message)

    async def _send(self, peer: PeerId, message: Message) -> None:
        try:
            await self._network.send(peer, message)
        except PeerError as error:
            self._observer.count("errors", code=error.code)
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]
            self._changed.notify()
