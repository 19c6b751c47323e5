"""Checks of what is the node's own: settings, key, manifest, side-car, leftovers."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator

import psutil
import trio

from node.client import ControlClient
from node.config import NodeConfig, load_config, unknown_variables
from node.doctor.finding import Finding, of_error, ok, warning, wrong
from node.identity import load_key, refuse_key_in_use
from node.paths import StatePaths
from node.sidecar import channel
from node.sidecar.link import Link
from node.sidecar.sweep import leftovers, make_folder
from protocol.deadlines import Deadlines
from protocol.errors import ConfigError, IdentityError, ShoalError, SidecarError
from protocol.invite import Invite
from protocol.keys import NodeKey
from protocol.manifest import Manifest, SignedManifest

_NO_SWARM = "0" * 64


def is_running(paths: StatePaths) -> bool:
    """Whether a daemon answers in this state directory."""
    with ControlClient(paths.root) as client:
        try:
            client.status()
        except ShoalError:
            return False
    return True


def check_settings(paths: StatePaths) -> tuple[Finding, NodeConfig]:
    """The settings can be read; else the defaults serve for the other checks."""
    try:
        config = load_config(paths.config).config
        if config.invite:
            Invite.decode(config.invite, time.time())
    except ConfigError as error:
        return of_error("settings", error), NodeConfig()
    for name, near in unknown_variables(os.environ).items():
        remedy = f"Call it {near}, or unset it." if near else "Unset it."
        return warning("settings", f"the variable {name} is ignored", remedy), config
    return ok("settings", f"{paths.config}" if paths.config.exists() else "all defaults"), config


def check_manifest(paths: StatePaths) -> tuple[Finding, Manifest | None]:
    """The manifest is whole and signed."""
    if not paths.manifest.exists():
        return ok("manifest", "none yet: it is fetched when the node joins"), None
    try:
        manifest = SignedManifest.from_toml(paths.manifest.read_text(errors="replace")).verify()
    except ConfigError as error:
        return of_error("manifest", error), None
    return ok("manifest", f"swarm {manifest.name} ({manifest.swarm_id[:12]})"), manifest


def check_key(paths: StatePaths, *, is_running: bool) -> Finding:
    """The key is the owner's alone and in use once at most."""
    if not paths.key.exists():
        return ok("key", "none yet: the first `shoal join` or `shoal swarm create` makes it")
    try:
        key = load_key(paths.key)
        if not is_running:
            refuse_key_in_use(key.peer_id)
    except IdentityError as error:
        return of_error("key", error)
    return ok("key", f"{key.peer_id}; keep a copy of {paths.key}")


async def check_sidecar(start_s: float | None = None) -> Finding:
    """A side-car starts, answers and ends."""
    limit_s = Deadlines().sidecar_start_s if start_s is None else start_s
    folder, began = make_folder(), trio.current_time()
    cause: str | None = f"no answer within {limit_s:g} s"
    try:
        with trio.move_on_after(limit_s):
            cause = await _try_sidecar(folder, limit_s)
            if cause is None:
                return ok("side-car", f"answered after {trio.current_time() - began:.1f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return wrong("side-car", str(cause), "See whether p2pd may run here: `shoal doctor --debug`.")


async def _try_sidecar(folder: str, limit_s: float) -> str | None:
    """Return why it failed, None if it did not."""
    try:
        link = await Link.open()
    except OSError as error:
        return str(error)
    start = channel.Start(
        swarm=_NO_SWARM,
        key=NodeKey(os.urandom(32)).to_bytes(),
        listen=("/ip4/127.0.0.1/tcp/0",),
        announce=(),
        bootstrap=(),
        maps_port=False,
        folder=folder,
        start_s=limit_s,
        dial_s=limit_s,
    )
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            try:
                await link.call(start, channel.Pong)
            except SidecarError as error:
                return error.cause
            finally:
                nursery.cancel_scope.cancel()
    finally:
        await link.close()
    return None


def check_leftovers(paths: StatePaths, *, is_running: bool) -> Finding:
    """Nothing is left of daemons that were killed."""
    found = [str(path) for path in leftovers()]
    if not is_running:
        found += _dead_files(paths)
    found += _orphans()
    if found:
        hint = "The next start removes dead files; end processes that you do not want with kill."
        return warning("leftovers", "; ".join(found), hint)
    return ok("leftovers", "none")


def _dead_files(paths: StatePaths) -> Iterator[str]:
    """A socket that nobody serves, and an invite to a node that does not run."""
    if paths.socket.is_socket() and not _is_served(paths):
        yield f"dead socket {paths.socket}"
    if paths.invite.exists():
        yield f"old invite {paths.invite}"


def _is_served(paths: StatePaths) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(paths.socket)) == 0


def _orphans() -> Iterator[str]:
    """Side-cars and p2pd of this user whose daemon is gone."""
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_ours = "node.sidecar.child" in words or process.name() == "p2pd"
            if is_ours and process.ppid() == 1 and process.uids().real == os.getuid():
                yield f"process {process.pid} ({process.name()})"
        except psutil.Error:  # it ended while we looked, or is another user's
            continue
