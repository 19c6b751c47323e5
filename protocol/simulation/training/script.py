"""Who crashes when: one script for all policies, whatever they do.

Policies take different times for a step and put nodes at different stages. So a script names sites,
not nodes, and counts a step's progress (the part of its jobs that is done), not seconds. A policy
that is slow therefore suffers no more crashes per step than one that is fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Nobody crashes in a step's very first and last jobs, where every policy would do the same.
_FIRST, _LAST = 0.02, 0.98


@dataclass(frozen=True, slots=True, order=True)
class Crash:
    """The node at ``site`` dies ``delay_s`` after this part of the step's jobs was done."""

    progress: float
    site: int
    delay_s: float


@dataclass(frozen=True)
class FaultScript:
    """The crashes of each step. At the next step's opening a newcomer starts at the same site."""

    crashes: tuple[tuple[Crash, ...], ...]

    @classmethod
    def draw(cls, sites: Sequence[int], steps: int, churn: float, seed: int) -> FaultScript:
        """Let ``churn`` of the sites crash in each step, at random times."""
        rng = Random(f"faults {seed}")  # noqa: S311 (a simulation)
        count = round(churn * len(sites))
        return cls(
            tuple(
                tuple(
                    sorted(
                        Crash(rng.uniform(_FIRST, _LAST), site, rng.random())
                        for site in rng.sample(list(sites), count)
                    )
                )
                for _ in range(steps)
            )
        )

    def of_step(self, step: int) -> tuple[Crash, ...]:
        """Return the crashes of one step, the earliest first."""
        return self.crashes[step] if step < len(self.crashes) else ()
