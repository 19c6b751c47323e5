"""When the side-car calls on which of the addresses that it was given."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

FIRST_PAUSE_S, LAST_PAUSE_S = 2.0, 60.0


@dataclass(slots=True)
class _Seed:
    peer: str
    due_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S


class Seeds:
    """Each address is called until its side-car is a neighbour, and again when it no longer is.

    It is not enough that one of them answers: nodes that start at the same moment, each of whose
    first answers came from another seed, would make two DHTs that nobody joins together.
    """

    def __init__(self, addresses: Sequence[str], rng: random.Random) -> None:
        self._seeds = {a: _Seed(a.rpartition("/p2p/")[2]) for a in addresses}
        self._rng = rng

    def due(self, neighbours: Collection[str], now: float) -> list[str]:
        """Return the addresses to call now: of none that is a neighbour, given by PeerIDs."""
        for seed in self._seeds.values():
            if seed.peer in neighbours:
                seed.due_at, seed.pause_s = now, FIRST_PAUSE_S
        return [
            address
            for address, seed in self._seeds.items()
            if seed.peer not in neighbours and seed.due_at <= now
        ]

    def called(self, address: str, *, answered: bool, is_alone: bool, now: float) -> None:
        """Wait longer after each failure, but never long while no side-car is known."""
        seed = self._seeds[address]
        if is_alone:
            seed.pause_s = FIRST_PAUSE_S
        elif answered:  # and yet not in the table, which has no room for everybody
            seed.pause_s = LAST_PAUSE_S
        seed.due_at = now + seed.pause_s * self._rng.uniform(0.5, 1.0)
        seed.pause_s = min(2 * seed.pause_s, LAST_PAUSE_S)
