"""Checks of what the computer has to give: memory, disk, ports, the clock."""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from node.assembly import MEMORY_SHARE, default_budget, plan_memory
from node.config import NodeConfig
from node.doctor.finding import Finding, of_error, ok, warning, wrong
from node.transport.addresses import refuse_taken
from protocol.errors import ConfigError, ResourceError
from protocol.manifest import Manifest

_MIB, _GIB = 2**20, 2**30
_LEAST_MEMORY = 512 * _MIB
_LEAST_DISK, _LITTLE_DISK = 64 * _MIB, _GIB
_CLOCK_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex
_TIMEX_BYTES = 256  # more than struct timex has


def check_memory(
    config: NodeConfig, manifest: Manifest | None, free_bytes: int | None = None
) -> Finding:
    """The stage fits into the memory that the node may use."""
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    try:
        budget = config.memory_bytes or default_budget(config.device, free)
    except ConfigError:  # told by the check of the device
        budget = int(free * MEMORY_SHARE)
    text = f"{free // _MIB} MiB free, {budget // _MIB} MiB for the node"
    if config.memory_bytes and config.memory_bytes > free:
        return warning("memory", text, "Close other programs, or lower --memory.")
    if manifest is not None:
        try:
            plan = plan_memory(manifest, config.model_copy(update={"memory_bytes": budget}))
        except ResourceError as error:
            return of_error("memory", error)
        stages = ", ".join(map(str, sorted(plan.fits)))
        needed = f"{-(-plan.needed_bytes // _MIB)} MiB needed at most"
        return ok("memory", f"{text}, {needed}; fits: stage {stages}")
    if free < _LEAST_MEMORY:
        return warning("memory", text, "Close other programs: the libraries need about as much.")
    return ok("memory", text)


def check_disk(root: Path, free_bytes: int | None = None) -> Finding:
    """The state directory can be written and has room."""
    place = next(p for p in (root, *root.parents) if p.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return wrong("disk", f"{place} cannot be written", "Name another directory with --state.")
    free = shutil.disk_usage(place).free if free_bytes is None else free_bytes
    text = f"{free // _MIB} MiB free at {place}"
    hint = "Free disk space, or name a directory on another disk with --state."
    if free < _LEAST_DISK:
        return wrong("disk", text, hint)
    return warning("disk", text, hint) if free < _LITTLE_DISK else ok("disk", text)


def check_ports(config: NodeConfig, *, is_running: bool) -> Finding:
    """The ports of the settings are free, or this node has them."""
    fixed = {
        config.listen_port: config.listen_host,
        config.dht_port: config.listen_host,
        config.metrics_port: str(config.metrics_host),
    }
    fixed.pop(0, None)
    if not fixed:
        return ok("ports", "any free ones will do")
    text = ", ".join(map(str, fixed))
    if is_running:
        return ok("ports", f"{text}: taken by this node, which runs")
    for port, host in fixed.items():
        try:
            refuse_taken(host, port)
        except ResourceError as error:
            return of_error("ports", error)
    return ok("ports", f"{text}: free")


def check_clock(
    paths: Iterable[Path], now: float | None = None, is_synchronised: bool | None = None
) -> Finding:
    """The clock is kept right by the system, and not older than files of this node."""
    now = time.time() if now is None else now
    newest = max((p.stat().st_mtime for p in paths if p.exists()), default=0.0)
    if now < newest - 1:
        cause = f"the clock is {newest - now:.0f} s behind files that were written already"
        return wrong("clock", cause, "Set the clock; NTP does it by itself.")
    known = _is_synchronised() if is_synchronised is None else is_synchronised
    if not known:
        hint = "Switch it on: `timedatectl set-ntp true`. Over 30 s off, the swarm refuses a node."
        return warning("clock", "nothing keeps the clock right (no NTP)", hint)
    return ok("clock", "the system keeps it right")


def _is_synchronised() -> bool:
    """Ask the kernel; zeros in struct timex change nothing."""
    answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return answer not in (-1, _CLOCK_UNSYNCHRONISED)
