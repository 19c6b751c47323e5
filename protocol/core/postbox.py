"""Sending for code that must not wait: pure rules and message handlers post, a task delivers."""

from __future__ import annotations

from collections.abc import Iterable

import trio

from protocol.core.signal import Signal
from protocol.errors import PeerError
from protocol.keys import PeerId
from protocol.messages import Message
from protocol.ports import Network, Observer

CAPACITY = 4096


class Postbox:
    """Soft state only: what is posted here is said again by its sender if it is lost."""

    def __init__(self, network: Network, observer: Observer) -> None:
        self._network, self._observer = network, observer
        self._posts, self._posted = trio.open_memory_channel[tuple[tuple[PeerId, ...], Message]](
            CAPACITY
        )
        self._num_open = 0
        self._changed = Signal()

    def post(self, peers: Iterable[PeerId], message: Message) -> None:
        """Send to each of these peers but this node itself."""
        others = tuple(peer for peer in peers if peer != self._network.peer_id)
        try:
            self._posts.send_nowait((others, message))
        except trio.WouldBlock:
            self._observer.count("errors", code="resource")
        else:
            self._num_open += len(others)

    async def flush(self) -> None:
        """Return when everything posted so far was delivered or failed."""
        await self._changed.until(lambda: self._num_open == 0)

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
            self._num_open -= 1
            self._changed.notify()
