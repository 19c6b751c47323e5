"""Ends the side-car with its daemon: a thread that does nothing but wait for the pipe's end."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading


def take_pipes() -> tuple[int, int, Lifeline]:
    """Return the daemon's pipes (requests, replies) under other numbers, and hang on to them."""
    requests, replies = os.dup(0), os.dup(1)
    lifeline = Lifeline(requests)
    lifeline.start()
    # Libraries and p2pd must neither write between our frames nor hold our pipe open.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return requests, replies, lifeline


class Lifeline:
    """Waits in a thread of its own, because a busy event loop would not notice the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.folder: str | None = None

    def start(self) -> None:
        """Begin to wait."""
        threading.Thread(target=self._wait, name="lifeline", daemon=True).start()

    def _wait(self) -> None:
        poll = select.poll()
        # No events asked for: only the hang-up, which is always told, wakes us. Data does not.
        poll.register(self._descriptor, 0)
        poll.poll()
        self.end()

    def end(self) -> None:
        """Remove the folder of sockets and kill the process group: p2pd and this process."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os._exit(0)
