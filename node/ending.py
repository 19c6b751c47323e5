"""How a daemon ends, and with which exit status.

0: it had nothing to hand over, or handed it over. STOPPED_STATUS: it was told twice, or draining
took longer than ``drain_s``. LOST_LIFELINE_STATUS: whoever started it is gone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from node.launch import LOST_LIFELINE_STATUS, STOPPED_STATUS
from protocol.errors import ResourceError
from protocol.ports import Observer

if TYPE_CHECKING:
    from trio_typing import TaskStatus

NUMBERS = (signal.SIGTERM, signal.SIGINT)


class Ending:
    """Turns signals into leaving and stopping. ``leaving`` may be set by others too.

    ``stop`` cancels ``scope``; a job that cannot be cancelled gets ``limit_s``.
    """

    def __init__(self, leaving: trio.Event, limit_s: float) -> None:
        self._leaving, self._limit_s = leaving, limit_s
        self.status = 0

    async def heed_signals(
        self,
        has_begun: Callable[[], bool],
        scope: trio.CancelScope,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """The first signal drains, the second stops at once, a third kills.

        A node that has not begun to serve has nothing to drain.
        """
        for number in NUMBERS:
            signal.signal(number, signal.SIG_DFL)  # what the receiver leaves behind
        with trio.open_signal_receiver(*NUMBERS) as signals:
            task_status.started()
            async for _ in signals:
                if not has_begun():
                    self._end(scope)
                    return
                if self._leaving.is_set():
                    self.stop(scope)
                    return
                self._leaving.set()

    def stop(self, scope: trio.CancelScope) -> None:
        """End without handing over."""
        self.status = STOPPED_STATUS
        self._end(scope)

    def time_out(self, scope: trio.CancelScope, observer: Observer, limit_s: float) -> None:
        """Draining took too long: say so, and end without handing over."""
        observer.event(
            "drain_timed_out", code=ResourceError.code,
            cause=f"the step in flight did not end within {limit_s:g} s, so this node's part of it"
            " is not handed over",
            hint="The swarm loses nothing: others compute it again. Where steps take longer, raise"
            " deadlines_scale (SHOAL_DEADLINES_SCALE).",
        )  # fmt: skip
        self.stop(scope)

    def _end(self, scope: trio.CancelScope) -> None:
        certain = threading.Timer(self._limit_s, os._exit, (self.status,))
        certain.daemon = True
        certain.start()
        scope.cancel()


def hold_lifeline(descriptor: int) -> None:
    """Whoever started us holds the other end; when it is gone, so are we, whatever we do."""
    while os.read(descriptor, 1):
        pass
    os._exit(LOST_LIFELINE_STATUS)
