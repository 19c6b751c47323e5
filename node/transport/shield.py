"""The one way in which a write or a clean-up is kept from being interrupted."""

from __future__ import annotations

import trio


def shielded(limit_s: float) -> trio.CancelScope:
    """A scope that cancellation from outside does not enter, for ``limit_s`` at most."""
    return trio.CancelScope(deadline=trio.current_time() + limit_s, shield=True)
