"""Runs a node in the foreground: `shoal join` and `shoal swarm run`.

The daemon is a child process. Ctrl-C and SIGTERM reach it as SIGTERM: the first lets it hand over
its work and leave, the second stops it at once. If this process is killed, its lifeline ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from cli.output import emit, emit_json, say
from node.client import ControlClient
from node.config import ENV_PREFIX, NodeConfig, load_config, write_config
from node.identity import load_or_create_key
from node.launch import STOPPED_STATUS, Lifeline, launch_daemon
from node.paths import StatePaths
from node.status import NodeStatus
from node.totals import Work, read_work
from protocol.errors import ConfigError, ResourceError, ShoalError
from protocol.keys import NodeKey

_POLL_S = 0.5
_PROGRESS_S = 10.0
_MISTAKES = (ConfigError.exit_status, ResourceError.exit_status)


def known_key(paths: StatePaths) -> NodeKey:
    """Return the node's key; a new one is announced, because nobody else can restore it."""
    is_new = not paths.key.exists()
    key = load_or_create_key(paths)
    if is_new:
        announce_key(paths, key)
    return key


def announce_key(paths: StatePaths, key: NodeKey) -> None:
    """Tell the owner of a new key what it is worth."""
    say(f"new identity {key.peer_id}\nits key is {paths.key}: back it up, nobody can restore it")


def remember(
    paths: StatePaths, flags: Mapping[str, object]
) -> tuple[NodeConfig, Callable[[], None]]:
    """Check the settings with ``flags`` and keep them in config.toml; raise ConfigError.

    A flag of None keeps what was there. The environment counts, but is not written down. Return
    the settings and what brings the file back to what it was.
    """
    before = paths.config.read_bytes() if paths.config.exists() else None
    loaded = load_config(paths.config, flags)
    kept = (name for name, _, origin in loaded.rows() if _is_kept(origin, paths))
    write_config(paths.config, NodeConfig(**{name: getattr(loaded.config, name) for name in kept}))
    return loaded.config, lambda: _restore(paths, before)


def _restore(paths: StatePaths, before: bytes | None) -> None:
    """Forget flags that were a mistake: the next start would repeat it without being told to."""
    if before is None:
        paths.config.unlink(missing_ok=True)
    else:
        paths.config.write_bytes(before)


def _is_kept(origin: str, paths: StatePaths) -> bool:
    return origin == str(paths.config) or origin.startswith("--")


def run_daemon(
    paths: StatePaths,
    flags: Mapping[str, object],
    *,
    as_json: bool,
    forget: Callable[[], None],
    options: Sequence[str] = (),
) -> int:
    """Run the daemon until it ends; tell each change of its state; return its exit status.

    ``flags`` are those that were remembered: the daemon must not see a variable that they overrule.
    ``forget`` is called if the node finds them wrong before it was ready.
    """
    tell = _tell_json if as_json else _tell_text
    before = read_work(paths.totals)
    with Lifeline() as lifeline, ControlClient(paths.root) as client:
        _forget_old_invite(paths, client)
        process = launch_daemon(paths.root, lifeline, environment=_without(flags), options=options)
        with _signals_to(process):
            news = News(paths, lambda: _status(client))
            while process.poll() is None:
                for name, fields in news.look():
                    tell(name, fields)
                _wait(process)
    if process.returncode in _MISTAKES and not news.was_ready:
        forget()
    tell("ended", _end_of(process.returncode, before, read_work(paths.totals)))
    return _told_end(process.returncode, paths)


def _without(flags: Mapping[str, object]) -> dict[str, str]:
    overruled = {
        f"{ENV_PREFIX}{name.upper()}" for name, value in flags.items() if value is not None
    }
    return {name: text for name, text in os.environ.items() if name not in overruled}


def _end_of(returncode: int, before: Work, after: Work) -> dict[str, object]:
    """Return what a run came to. A killed node's last second of work is not in it."""
    return {
        "status": _as_shells_tell(returncode),
        "microbatches": after.microbatches - before.microbatches,
        "steps": after.steps - before.steps,
        "microbatches_total": after.microbatches,
    }


def _as_shells_tell(returncode: int) -> int:
    """Popen tells a death by signal as a negative number, a shell as 128 and the signal's."""
    return returncode if returncode >= 0 else 128 - returncode


def _told_end(status: int, paths: StatePaths) -> int:
    """Say how the daemon ended if it ended badly; return its exit status as a shell tells it."""
    if status == 0:
        return 0
    how = f"with status {status}" if status > 0 else f"by signal {_signal_name(-status)}"
    say(f"the node ended {how}; its log is {paths.log}")
    return _as_shells_tell(status)


def _signal_name(number: int) -> str:
    known = {signal_.value: signal_.name for signal_ in signal.Signals}
    return known.get(number, str(number))


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


class News:
    """Tells what changed since it was last asked: the invite, the state, and now and then a step.

    ``ask`` returns the daemon's status, None while it does not answer; ``clock`` counts seconds.
    """

    def __init__(
        self,
        paths: StatePaths,
        ask: Callable[[], NodeStatus | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths, self._ask, self._clock = paths, ask, clock
        self._invite = ""
        self._last: NodeStatus | None = None  # as it was told
        self._told_at = clock()

    @property
    def was_ready(self) -> bool:
        """Whether the node ever got beyond its start."""
        return self._last is not None and self._last.state != "starting"

    def look(self) -> Iterator[tuple[str, dict[str, object]]]:
        """Yield the name and the fields of each piece of news."""
        text = _read(self._paths)
        if text and text != self._invite:
            self._invite = text
            yield "invite", {"invite": text}
        now = self._ask()
        name = self._what(now) if now else None
        if now and name:
            self._last, self._told_at = now, self._clock()
            yield name, now.model_dump(mode="json")

    def _what(self, now: NodeStatus) -> str | None:
        last = self._last
        if last is None or _seen(now) != _seen(last):
            return "state"
        is_due = self._clock() - self._told_at >= _PROGRESS_S
        return "progress" if is_due and now.step > last.step else None


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
    if name == "ended":
        emit(_closing_word(fields))
        return
    stage = "no stage yet" if fields["stage"] is None else f"stage {fields['stage']}"
    line = f"{fields['state']}: {stage}, step {fields['step']}"
    if name == "progress":
        loss = fields["loss"]  # only a data node knows it; no number at all is a string in JSON
        emit(line if loss is None else f"{line}, loss {float(str(loss)):.3f}")
        return
    emit(f"{line}, swarm {fields['name']}" if fields["name"] else line)
    problem = fields["last_problem"]
    if isinstance(problem, Mapping):
        say(f"problem[{problem['code']}]: {problem['text']}")
        if problem["hint"]:
            say(f"remedy: {problem['hint']}")


def _closing_word(fields: Mapping[str, object]) -> str:
    how = {0: "left cleanly", STOPPED_STATUS: "stopped before its work was handed over"}
    word = how.get(int(str(fields["status"])), "ended")
    return (
        f"{word}: {fields['microbatches']} microbatches of this run count, in {fields['steps']}"
        f" steps; {fields['microbatches_total']} of all runs"
    )
