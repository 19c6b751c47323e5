"""Runs a node in the foreground: `shoal join` and `shoal swarm run`.

The daemon is a child process. Ctrl-C and SIGTERM reach it as SIGTERM: the first lets it hand over
its work and leave, the second stops it at once. If this process is killed, its lifeline ends it.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from cli.output import emit, emit_json, say
from node.client import ControlClient
from node.config import NodeConfig, load_config, write_config
from node.identity import load_or_create_key
from node.launch import Lifeline, launch_daemon
from node.paths import StatePaths
from node.status import NodeStatus
from protocol.errors import ShoalError
from protocol.keys import NodeKey

_POLL_S = 0.5
Teller = Callable[[str, Mapping[str, object]], None]


def known_key(paths: StatePaths) -> NodeKey:
    """Return the node's key; a new one is announced, because nobody else can restore it."""
    is_new = not paths.key.exists()
    key = load_or_create_key(paths)
    if is_new:
        say(
            f"new identity {key.peer_id}\nits key is {paths.key}: back it up, nobody can restore it"
        )
    return key


def remember(paths: StatePaths, flags: Mapping[str, object]) -> NodeConfig:
    """Check the settings with ``flags`` and keep them in config.toml; raise ConfigError.

    A flag of None keeps what was there. The environment counts, but is not written down.
    """
    loaded = load_config(paths.config, flags)
    kept = (name for name, _, origin in loaded.rows() if _is_kept(origin, paths))
    write_config(paths.config, NodeConfig(**{name: getattr(loaded.config, name) for name in kept}))
    return loaded.config


def _is_kept(origin: str, paths: StatePaths) -> bool:
    return origin == str(paths.config) or origin.startswith("--")


def run_daemon(paths: StatePaths, *, as_json: bool) -> int:
    """Run the daemon until it ends; tell each change of its state; return its exit status."""
    tell = _tell_json if as_json else _tell_text
    with Lifeline() as lifeline, ControlClient(paths.root) as client:
        _forget_old_invite(paths, client)
        process = launch_daemon(paths.root, lifeline)
        with _signals_to(process):
            changes = _changes(paths, client)
            while process.poll() is None:
                for name, fields in next(changes):
                    tell(name, fields)
                _wait(process)
    # Popen tells a death by signal as a negative number, a shell as 128 and the signal's number.
    status = process.returncode
    return status if status >= 0 else 128 - status


def _forget_old_invite(paths: StatePaths, client: ControlClient) -> None:
    """It would be told before the node can be reached anew; that of a running daemon stays."""
    try:
        client.status()
    except ShoalError:
        paths.invite.unlink(missing_ok=True)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return


@contextmanager
def _signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand SIGINT and SIGTERM on to the daemon as SIGTERM while the block runs."""
    count = 0

    def hand_on(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        say("handing over and leaving; once more to stop at once" if count == 1 else "stopping")
        process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _changes(
    paths: StatePaths, client: ControlClient
) -> Iterator[list[tuple[str, dict[str, object]]]]:
    """Yield, each time that it is asked, what is new since it was asked before."""
    invite = ""
    last: NodeStatus | None = None
    while True:
        news: list[tuple[str, dict[str, object]]] = []
        text = _read(paths)
        if text and text != invite:
            invite = text
            news.append(("invite", {"invite": invite}))
        now = _status(client)
        if now is not None and (last is None or _seen(now) != _seen(last)):
            last = now
            news.append(("state", now.model_dump(mode="json")))
        yield news


def _read(paths: StatePaths) -> str:
    file = paths.root / "invite"
    return file.read_text().strip() if file.exists() else ""


def _status(client: ControlClient) -> NodeStatus | None:
    try:
        return client.status()
    except ShoalError:
        return None


def _seen(status: NodeStatus) -> tuple[object, ...]:
    """What is worth a line of its own when it changes."""
    return status.state, status.stage, status.last_problem


def _tell_json(name: str, fields: Mapping[str, object]) -> None:
    emit_json({"event": name, **fields})


def _tell_text(name: str, fields: Mapping[str, object]) -> None:
    if name == "invite":
        emit(f"the swarm can be joined; volunteers run:\n\n  shoal join {fields['invite']}\n")
        return
    stage = "no stage yet" if fields["stage"] is None else f"stage {fields['stage']}"
    emit(f"{fields['state']}: {stage}, step {fields['step']}, swarm {fields['name']}")
    problem = fields["last_problem"]
    if isinstance(problem, Mapping):
        say(f"problem[{problem['code']}]: {problem['text']}")
