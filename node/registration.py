"""Whether others can find this node: only another peer's word that it read the record counts."""

from __future__ import annotations

from collections.abc import Callable

import trio

from node.transport.session import Heartbeat
from protocol.deadlines import Deadlines
from protocol.keys import PeerId
from protocol.ports import Observer


class Registration:
    """Collects from heartbeats which of this node's records peers have read back."""

    def __init__(
        self, deadlines: Deadlines, observer: Observer, wall_clock: Callable[[], float]
    ) -> None:
        self._lifetime_s = deadlines.record_lifetime_s
        self._observer = observer
        self._wall_clock = wall_clock
        self._newest_ms = 0

    def on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        """A peer says which of our records it has read; sequences are wall milliseconds."""
        self._newest_ms = max(self._newest_ms, heartbeat.record_seen)

    @property
    def is_registered(self) -> bool:
        """Whether a peer has read a record of ours that is not yet expired."""
        return self._wall_clock() - self._newest_ms / 1000 < self._lifetime_s

    async def watch(self, has_peers: Callable[[], bool], doubt: Callable[[str], None]) -> None:
        """Doubt the side-car when peers are there and none of them can read our record."""
        unseen_since = trio.current_time()
        while True:
            self._observer.gauge("registered", float(self.is_registered))
            if self.is_registered or not has_peers():
                unseen_since = trio.current_time()
            elif trio.current_time() - unseen_since > self._lifetime_s:
                doubt("no peer can read this node's record")
                unseen_since = trio.current_time()
            await trio.sleep(1.0)
