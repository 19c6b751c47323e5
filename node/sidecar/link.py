"""One life of the side-car's process: start by exec, typed calls over its pipes, certain end."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from typing import TypeVar

import trio

from node.sidecar import channel
from protocol.errors import SidecarError

R = TypeVar("R", bound=channel.Packet)

_QUEUE = 64
_LAST_WORDS_S = 0.1


class Link:
    """A running side-car. ``run`` must run for calls to be answered; it returns at its end."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._calls = itertools.count()
        self._waiting: dict[int, _Waiter] = {}
        self._outbox, self._outgoing = trio.open_memory_channel[bytes](_QUEUE)
        self._last_words: deque[str] = deque(maxlen=1)
        self._is_ended = False
        self._is_killed = False

    @classmethod
    async def open(cls, program: str = "node.sidecar.child") -> Link:
        """Start the child in a session and process group of its own.

        Ctrl-C in the terminal then reaches the daemon alone, and p2pd can be killed by group.
        ``-P`` keeps a folder ``node`` of the current directory from being run instead of ours.
        """
        process = await trio.lowlevel.open_process(
            [sys.executable, "-P", "-m", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "HIVEMIND_LOGLEVEL": "ERROR", "PYTHONUNBUFFERED": "1"},
        )
        return cls(process)

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group's."""
        return self._process.pid

    async def call(self, request: channel.Packet, reply: type[R]) -> R:
        """Return the reply to ``request``; raise SidecarError if it fails or the child ends."""
        number, waiter = next(self._calls), _Waiter()
        frame = channel.encode(number, request)
        if self._is_ended:
            raise SidecarError(self._epitaph)
        self._waiting[number] = waiter
        try:
            await self._outbox.send(frame)
            await waiter.is_done.wait()
        except trio.BrokenResourceError:
            raise SidecarError(self._epitaph) from None
        finally:
            del self._waiting[number]
        if waiter.reply is None:
            raise SidecarError(self._epitaph)
        if isinstance(waiter.reply, channel.Failure):
            raise SidecarError(f"the side-car could not do it: {waiter.reply.cause}")
        if not isinstance(waiter.reply, reply):
            raise SidecarError(f"the side-car replied {type(waiter.reply).__name__} to {request}")
        return waiter.reply

    async def run(self) -> str:
        """Carry calls and replies until the process ends; return why it did."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                nursery.start_soon(self._listen)
                await self._process.wait()
                self._kill_group()
                # What the child said last is worth a moment.
                await trio.sleep(_LAST_WORDS_S)
                nursery.cancel_scope.cancel()
        finally:
            self._is_ended = True
            self._outgoing.close()
            for waiter in self._waiting.values():
                waiter.is_done.set()
        return self._epitaph

    async def close(self) -> None:
        """End the child and its p2pd, by force: they hold nothing that would be worth a goodbye."""
        self._kill_group()
        with trio.CancelScope(shield=True):
            await self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
                if stream is not None:
                    await stream.aclose()
        self._outbox.close()
        self._outgoing.close()

    def _kill_group(self) -> None:
        """Kill once: after the process is reaped, its number may become another's."""
        if self._is_killed:
            return
        self._is_killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def _epitaph(self) -> str:
        status = self._process.returncode
        state = "is gone" if status is None else f"ended with status {status}"
        return ": ".join([f"the side-car {state}", *self._last_words])

    async def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for frame in self._outgoing:
                await stdin.send_all(frame)

    async def _read(self) -> None:
        stdout, decoder = self._process.stdout, channel.Decoder()
        assert stdout is not None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in stdout:
                for number, reply in decoder.replies(bytes(data)):
                    # Whoever gave up waiting is no longer listed.
                    if waiter := self._waiting.get(number):
                        waiter.reply = reply
                        waiter.is_done.set()

    async def _listen(self) -> None:
        """Keep the last line that the child wrote: its cause of death, if it dies."""
        stderr, rest = self._process.stderr, b""
        assert stderr is not None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in stderr:
                lines = (rest + bytes(data)).split(b"\n")
                rest = lines.pop()[-1000:]
                said = [line for line in lines if line.strip()]
                if said:
                    self._last_words.append(said[-1].decode(errors="replace").strip()[:300])


class _Waiter:
    """Where a call waits for its reply; none means that the child ended."""

    def __init__(self) -> None:
        self.is_done = trio.Event()
        self.reply: channel.Reply | None = None
