"""A process that takes orders as JSON lines on stdin and answers each with one on stdout."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

_START_S, _STOP_S = 240.0, 5.0


class EndFailed(Exception):
    """An end died or gave no answer."""


class End:
    """Such a process; the first thing it says, unasked, is where it listens."""

    def __init__(self, program: Path, *arguments: str, prefix: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(program), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Where it listens; waits until it does."""
        if self._address is None:
            self._address = str(self.answer(_START_S)["address"])
        return self._address

    def ask(self, **order: Any) -> dict[str, Any]:
        """Give an order and wait for the answer; raise EndFailed."""
        self.tell(**order)
        return self.answer()

    def tell(self, **order: Any) -> None:
        """Give an order; its answer must be fetched."""
        _ = self.address  # it must have started
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            raise EndFailed from None

    def answer(self, limit_s: float = 90.0) -> dict[str, Any]:
        """Wait for the next answer; raise EndFailed."""
        out = self._process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], limit_s)
        line = out.readline() if ready else b""
        if not line:
            raise EndFailed
        return dict(json.loads(line))

    def kill(self) -> None:
        """SIGKILL the process and what it started, as a power cut would."""
        whole = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in whole:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it: at the end of its input, or by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()


def say(answer: dict[str, Any]) -> None:
    """Answer, in the process itself."""
    print(json.dumps(answer), flush=True)


def cpu_s() -> float:
    """Processor seconds of this process and its children."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total
