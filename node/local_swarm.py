"""A whole swarm of real daemons on this computer: for the demo and for the tests.

    root/data-1/          the organiser: data node, seed and authority
    root/data-2/ ..       further data nodes
    root/stage-1-a/ ..    the volunteers, by the stage that they hold

Each daemon is a process of its own on a lifeline (``launch``). All carry a mark in their
environment, and so do their children: by it, leftovers are found.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from string import ascii_lowercase
from types import TracebackType
from typing import Literal, Self

import psutil

from node.client import ControlClient
from node.config import ENV_PREFIX, RUN_VARIABLE, NodeConfig, write_config
from node.identity import load_or_create_key
from node.launch import Lifeline, launch_daemon
from node.paths import StatePaths
from node.status import NodeStatus, StepStatus
from protocol.errors import ResourceError, ShoalError
from protocol.keys import PeerId
from protocol.manifest import Manifest, SignedManifest, sign

Role = Literal["data", "volunteer"]
START_LIMIT_S = 240.0
_POLL_S = 0.1
_KILLED_LIMIT_S = 10.0


@dataclass
class Daemon:
    """One node of the local swarm and its process."""

    name: str
    role: Role
    stage: int | None
    state_dir: Path
    peer_id: PeerId
    process: subprocess.Popen[bytes]
    is_wanted: bool = True  # nobody has told it to end
    client: ControlClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = ControlClient(self.state_dir)

    @property
    def pid(self) -> int:
        """The process id of the daemon."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    @property
    def output_path(self) -> Path:
        """Where the daemon's stdout and stderr go."""
        return self.state_dir / "output.log"

    def status(self) -> NodeStatus | None:
        """Return what the daemon says of itself, or None while it does not answer."""
        try:
            return self.client.status()
        except ShoalError:
            return None

    def steps(self, after: int = -1) -> list[StepStatus]:
        """Return the finished steps above ``after`` that a data node tells; none if it is busy."""
        try:
            return self.client.steps(after)
        except ShoalError:
            return []

    def last_lines(self, count: int = 15) -> list[str]:
        """Return the end of the daemon's output."""
        text = self.output_path.read_text(errors="replace") if self.output_path.exists() else ""
        return text.splitlines()[-count:]

    def send(self, number: int) -> None:
        """Send a signal to the daemon, if it still runs."""
        if self.is_running:
            self.process.send_signal(number)


class DaemonDiedError(ResourceError):
    """A daemon of the local swarm ended although nobody asked it to."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(
            f"{daemon.name} ended with status {daemon.process.returncode}",
            f"Its output is in {daemon.output_path}.",
        )
        self.daemon = daemon


def _clean_environment() -> dict[str, str]:
    """Return our environment without what is meant for a node of its owner's."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
    # Many nodes share this computer's cores: one thread each.
    return {**kept, "OMP_NUM_THREADS": "1"}


class LocalSwarm:
    """Starts, watches, disturbs and stops the daemons of one swarm under ``root``.

    ``manifest`` gets the PeerIDs of the data nodes, the organiser's first, and returns what to
    train. Use it as a context manager: leaving it stops everything.
    """

    def __init__(
        self,
        root: Path,
        manifest: Callable[[Sequence[PeerId]], Manifest],
        *,
        holders: int = 2,
        data_nodes: int = 1,
        data: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.root = root.absolute()
        self.run_id = secrets.token_hex(8)
        self.holders = holders
        self.data_names = [f"data-{k + 1}" for k in range(data_nodes)]
        self.data = tuple(path.absolute() for path in data)
        self.environment = {**_clean_environment(), **(environment or {})}
        self.environment[RUN_VARIABLE] = self.run_id
        self.daemons: list[Daemon] = []
        self.invite = ""
        self._hurry = threading.Event()
        self._lifeline = Lifeline()
        keys = [load_or_create_key(StatePaths(self.root / name)) for name in self.data_names]
        self.signed: SignedManifest = sign(manifest([key.peer_id for key in keys]), keys[0])

    @property
    def manifest(self) -> Manifest:
        """What the swarm trains."""
        return self.signed.manifest

    @property
    def organiser(self) -> Daemon:
        """The data node that everybody else joins."""
        return self[self.data_names[0]]

    def __getitem__(self, name: str) -> Daemon:
        """Return the daemon of that name."""
        return next(daemon for daemon in self.daemons if daemon.name == name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- starting

    def start(self, told: Callable[[str], None] = lambda line: None) -> None:
        """Start the organiser, then everybody else; return when all answer on their sockets.

        ``told`` hears what happens. Raises DaemonDiedError, or ShoalError after START_LIMIT_S.
        """
        told("starting the organiser")
        self.spawn("data", name=self.data_names[0])
        self.wait_until(lambda: bool(self._read_invite()), "the organiser to be reachable")
        self.invite = self._read_invite()
        told(f"starting {self.num_nodes - 1} more nodes")
        for name in self.data_names[1:]:
            self.spawn("data", name=name)
        for stage in range(1, self.manifest.num_stages + 1):
            for _ in range(self.holders):
                self.spawn("volunteer", stage)
        self.wait_until(lambda: all(d.status() for d in self.daemons), "all nodes to answer")

    @property
    def num_nodes(self) -> int:
        """How many daemons ``start`` starts."""
        return len(self.data_names) + self.manifest.num_stages * self.holders

    def spawn(
        self,
        role: Role,
        stage: int | None = None,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> Daemon:
        """Start one more daemon; a ``name`` that was used before starts again on its old state."""
        name = name or self._free_name(role, stage)
        paths = StatePaths(self.root / name)
        peer_id = load_or_create_key(paths).peer_id
        write_config(paths.config, self._config(name, role, stage))
        if name == self.data_names[0]:
            paths.manifest.write_text(self.signed.to_toml())
        with (paths.root / "output.log").open("ab") as output:
            process = launch_daemon(
                paths.root,
                self._lifeline,
                output=output,
                environment={**self.environment, **(env or {})},
            )
        for before in [daemon for daemon in self.daemons if daemon.name == name]:
            before.client.close()
            self.daemons.remove(before)
        self.daemons.append(Daemon(name, role, stage, paths.root, peer_id, process))
        return self.daemons[-1]

    def _config(self, name: str, role: Role, stage: int | None) -> NodeConfig:
        is_organiser = name == self.data_names[0]
        return NodeConfig(
            role="organiser" if is_organiser else role,
            invite=None if is_organiser else self.invite,
            stage=stage,
            data=self.data if role == "data" else (),
            listen_host="127.0.0.1",
        )

    def _free_name(self, role: Role, stage: int | None) -> str:
        taken = {daemon.name for daemon in self.daemons}
        if role == "data":
            names: Iterator[str] = (f"data-{k}" for k in range(1, 1000))
        else:
            prefix = "spare" if stage is None else f"stage-{stage}"
            names = (f"{prefix}-{end}" for end in chain(ascii_lowercase, count(27)))
        return next(name for name in names if name not in taken)

    def _read_invite(self) -> str:
        path = self.organiser.state_dir / "invite"
        return path.read_text().strip() if path.exists() else ""

    # --- watching and disturbing

    def check(self) -> None:
        """Raise DaemonDiedError if a daemon ended that nobody stopped or killed."""
        for daemon in self.daemons:
            if daemon.is_wanted and not daemon.is_running:
                raise DaemonDiedError(daemon)

    def wait_until(
        self, condition: Callable[[], bool], what: str, limit_s: float = START_LIMIT_S
    ) -> None:
        """Poll until ``condition``; raise DaemonDiedError, or ResourceError after ``limit_s``."""
        end = time.monotonic() + limit_s
        while not condition():
            self.check()
            if time.monotonic() > end:
                raise ResourceError(
                    f"waited {limit_s:.0f} s for {what}", f"The nodes' logs are under {self.root}."
                )
            self._hurry.wait(_POLL_S)

    def kill(self, name: str) -> None:
        """SIGKILL a daemon, as a power cut would, and wait until it has gone."""
        daemon = self[name]
        daemon.is_wanted = False
        daemon.send(signal.SIGKILL)
        daemon.process.wait()

    def freeze(self, name: str) -> None:
        """SIGSTOP a daemon: its connections stay open and say nothing."""
        self[name].send(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let a frozen daemon go on."""
        self[name].send(signal.SIGCONT)

    # --- ending

    def stop(self, patience_s: float = 10.0) -> None:
        """End every daemon: SIGTERM to drain, again to stop, at last SIGKILL; may be repeated."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            running = [daemon for daemon in self.daemons if daemon.is_running]
            for daemon in running:
                daemon.is_wanted = False
                daemon.send(signal.SIGCONT)
                daemon.send(number)
            if number != signal.SIGKILL:
                self._wait_for_end(running, patience_s)
        self._lifeline.cut()
        for daemon in self.daemons:
            daemon.process.wait(_KILLED_LIMIT_S)
            daemon.client.close()

    def hurry(self) -> None:
        """Make a ``stop`` in progress kill at once; for a signal handler."""
        self._hurry.set()

    def _wait_for_end(self, daemons: Iterable[Daemon], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while any(daemon.is_running for daemon in daemons) and time.monotonic() < end:
            if self._hurry.wait(_POLL_S):
                return

    def leftovers(self, grace_s: float = 5.0) -> list[psutil.Process]:
        """Return the processes of this run that still live after ``grace_s``, and kill them.

        Call it after ``stop``. Side-cars end by themselves when their daemon has gone.
        """
        end = time.monotonic() + grace_s
        while (found := list(self._processes())) and time.monotonic() < end:
            threading.Event().wait(_POLL_S)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return found

    def _processes(self) -> Iterator[psutil.Process]:
        """Yield what runs with our mark in its environment: daemons, side-cars, their p2pd."""
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(RUN_VARIABLE) == self.run_id
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:  # it ended while we looked, or is another user's
                continue

    def saved(self) -> list[Path]:
        """Return the files with trained weights."""
        return sorted(self.root.glob("*/weights/*.safetensors"))
