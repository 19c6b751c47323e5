"""The DHT side-car: discovery through hivemind, in a process of its own.

``child`` is that process: it alone imports hivemind (which cannot share a process with libp2p).
``Sidecar`` (supervisor) starts it by exec, watches and restarts it; ``SidecarRegistry`` (registry)
is the daemon's Registry port on top; ``channel`` is what the two say to each other over pipes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.sidecar.registry import SidecarRegistry
    from node.sidecar.supervisor import Sidecar, SidecarOptions

__all__ = ["Sidecar", "SidecarOptions", "SidecarRegistry"]

_HOMES = {
    "Sidecar": "node.sidecar.supervisor",
    "SidecarOptions": "node.sidecar.supervisor",
    "SidecarRegistry": "node.sidecar.registry",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for: the child passes here and must stay small."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
