"""Starting a daemon as a child process that cannot outlive its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

LOST_LIFELINE_STATUS = 70
STOPPED_STATUS = 128 + signal.SIGTERM  # as a shell tells the death of a process by SIGTERM


class Lifeline:
    """A pipe whose write end only this process holds: when we are gone, its readers see the end.

    It needs neither a clean exit of ours nor anything between fork and exec in the child.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        self._is_cut = False

    @property
    def fileno(self) -> int:
        """The end that the daemon reads."""
        return self._read_end

    def cut(self) -> None:
        """End the pipe: whoever still reads it ends at once; may be repeated."""
        if not self._is_cut:
            self._is_cut = True
            os.close(self._write_end)
            os.close(self._read_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()


def launch_daemon(
    state_dir: Path,
    lifeline: Lifeline,
    *,
    output: IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """Start the daemon of a state directory in a session of its own; Ctrl-C does not reach it.

    Its stdout and stderr go to ``output``, or both to our stderr; its environment is ours if none
    is given. ``options`` are further ones of ``node.main``.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-P",  # a folder named node where we happen to stand is not meant
            "-m",
            "node.main",
            "--state",
            str(state_dir),
            "--lifeline-fd",
            str(lifeline.fileno),
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=output if output is not None else sys.stderr,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=(lifeline.fileno,),
        start_new_session=True,
    )
