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
from node.config import ENV_PREFIX, NodeConfig, load_config
from node.identity import refuse_in_use
from node.invites import read_invite
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
    no_retry: Annotated[
        bool, typer.Option("--no-retry", help="Give up when no seed of the swarm answers.")
    ] = False,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join a swarm and work for it until Ctrl-C. The settings are kept for the next time."""
    paths = state_paths(state)
    refuse_in_use(paths)
    invite = invite or _invite_in_file(paths)
    _check_invite(paths, invite)
    known_key(paths)
    flags = {
        "invite": invite,
        "role": role.value if role else None,
        "stage": stage,
        "device": device,
        "threads": threads,
        "memory_bytes": memory,
        "metrics_port": metrics_port,
        "data": tuple(path.absolute() for path in data) if data else None,
    }
    config, forget = remember(paths, flags)
    if config.invite is None:
        raise _no_invite(paths, config)
    say(f"joining as {config.role}; the node's directory is {paths.root}")
    options = ("--no-retry",) if no_retry else ()
    status = run_daemon(paths, flags, as_json=as_json, forget=forget, options=options)
    raise typer.Exit(status)


def _invite_in_file(paths: StatePaths) -> str | None:
    """Return what SHOAL_INVITE_FILE holds, unless SHOAL_INVITE is the invite itself."""
    loaded = load_config(paths.config)
    is_in_environment = loaded.origins["invite"] == f"{ENV_PREFIX}INVITE"
    return None if is_in_environment else read_invite(loaded.config)


def _no_invite(paths: StatePaths, config: NodeConfig) -> ConfigError:
    if config.invite_file is None:
        cause = f"{paths.root} has joined no swarm yet"
        return ConfigError(cause, "Give the invite: `shoal join INVITE`.")
    return ConfigError(
        f"{paths.root} has joined no swarm yet, and there is no invite in {config.invite_file}",
        "The organiser's node writes it when it can be reached: start that one first.",
    )


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
