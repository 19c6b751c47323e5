"""Taking part in a swarm: `shoal join` and `shoal leave`."""

from __future__ import annotations

import threading
import time
from enum import StrEnum
from typing import Annotated

import typer

from cli.foreground import known_key, remember, run_daemon
from cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    MemoryOption,
    MetricsPortOption,
    StateOption,
    ThreadsOption,
)
from cli.output import emit, emit_json, say
from node.client import ControlClient
from node.paths import StatePaths, state_paths
from protocol.deadlines import Deadlines
from protocol.errors import ConfigError, ResourceError, Unreachable

_POLL_S = 0.2


class JoinRole(StrEnum):
    """What a joiner offers."""

    VOLUNTEER = "volunteer"
    DATA = "data"


def join(
    invite: Annotated[
        str | None, typer.Argument(help="The organiser's line; not needed to come back.")
    ] = None,
    role: Annotated[
        JoinRole | None,
        typer.Option(help="Compute a stage (volunteer, the default), or feed text (data)."),
    ] = None,
    stage: Annotated[
        int | None, typer.Option(help="Serve this stage; by default where it is needed.", min=1)
    ] = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    memory: MemoryOption = None,
    metrics_port: MetricsPortOption = None,
    data: DataOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join a swarm and work for it until Ctrl-C. The settings are kept for the next time."""
    paths = state_paths(state)
    _check_invite(paths, invite)
    known_key(paths)
    config = remember(
        paths,
        {
            "invite": invite,
            "role": role.value if role else None,
            "stage": stage,
            "device": device,
            "threads": threads,
            "memory_bytes": memory,
            "metrics_port": metrics_port,
            "data": tuple(path.absolute() for path in data) if data else None,
        },
    )
    if config.invite is None:
        raise ConfigError(
            f"{paths.root} has joined no swarm yet", "Give the invite: `shoal join INVITE`."
        )
    say(f"joining as {config.role}; the node's directory is {paths.root}")
    raise typer.Exit(run_daemon(paths, as_json=as_json))


def _check_invite(paths: StatePaths, text: str | None) -> None:
    """Refuse a malformed invite, and one to another swarm than this directory's."""
    if text is None:
        return
    from protocol.invite import Invite

    invite = Invite.decode(text, time.time())
    known = swarm_of(paths)
    if known not in (None, invite.swarm_id):
        raise ConfigError(
            f"{paths.root} belongs to swarm {known}, the invite leads to {invite.swarm_id}",
            "Give the other swarm a directory of its own with --state.",
        )


def swarm_of(paths: StatePaths) -> str | None:
    """Return the id of the swarm whose manifest lies in the state directory, if there is one."""
    from protocol.manifest import SignedManifest

    if not paths.manifest.exists():
        return None
    return SignedManifest.from_toml(paths.manifest.read_text(errors="replace")).manifest.swarm_id


def leave(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Let the running node hand over its work and end; returns when it has."""
    paths = state_paths(state)
    with ControlClient(paths.root) as client:
        client.leave()
        _wait_for_end(client, Deadlines().drain_s + Deadlines().control_s)
    if as_json:
        emit_json({"left": True})
    else:
        emit("left")


def _wait_for_end(client: ControlClient, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            client.status()
        except Unreachable:
            return
        threading.Event().wait(_POLL_S)
    raise ResourceError(
        f"the node still runs after {limit_s:.0f} s", "Stop it with Ctrl-C in its terminal."
    )
