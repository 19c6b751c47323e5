"""All checks in their order."""

from __future__ import annotations

from collections.abc import Iterator

import trio

from node.doctor import machine, own, software
from node.doctor.finding import Finding
from node.paths import StatePaths


def examine(paths: StatePaths) -> Iterator[Finding]:
    """Yield the findings about a state directory as they are made; nothing is changed."""
    running = own.is_running(paths)
    yield software.check_python()
    yield software.check_libraries()
    yield software.check_gmp()
    yield software.check_compiler()
    settings, config = own.check_settings(paths)
    yield settings
    yield own.check_key(paths, is_running=running)
    known, manifest = own.check_manifest(paths)
    yield known
    yield software.check_device(config.device)
    yield machine.check_memory(config, manifest)
    yield machine.check_disk(paths.root)
    yield machine.check_ports(config, is_running=running)
    yield machine.check_clock([paths.key, paths.config, paths.manifest, paths.log])
    yield own.check_leftovers(paths, is_running=running)
    yield trio.run(own.check_sidecar)
