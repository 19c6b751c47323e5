"""The witness: notes every state that any node ever moved to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import trio

from protocol.ports import BlockStage, EdgeStage, Tensor
from protocol.simulation.trace import Trace


@dataclass(frozen=True, slots=True)
class Moved:
    """A node's state became ``digest``: the one of ``stage`` after ``step`` optimiser steps.

    ``counts`` says, for stages that count, how often each slot is in the step that made the state;
    ``num_microbatches`` is what that step divided by. Both are known of a state that some node
    prepared, also if it was applied by nobody and only read from disks again.
    """

    time_s: float
    node: str
    how: Literal["start", "apply", "import"]
    stage: int
    step: int
    digest: str
    counts: tuple[int, ...] = ()
    num_microbatches: int = 0


Made = dict[str, tuple[tuple[int, ...], int]]
"""By the digest of each prepared state: its step's counts and divisor."""


class WatchedStage:
    """Passes everything on to a stage and reports each move."""

    def __init__(
        self, stage: int, inner: Any, report: Callable[[Moved], None], node: str, made: Made
    ) -> None:
        self._stage, self._inner, self._report, self._node = stage, inner, report, node
        self._made = made
        self._moved("start")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def prepare(self, gradient_sum: Tensor, num_microbatches: int) -> str:
        """Prepare, and remember the counts and the divisor."""
        digest = cast(str, self._inner.prepare(gradient_sum, num_microbatches))
        counts = getattr(self._inner, "prepared_counts", ())
        self._made[digest] = counts, num_microbatches
        return digest

    def apply(self) -> None:
        """Apply and report."""
        self._inner.apply()
        self._moved("apply")

    def import_state(self, data: Tensor, digest: str) -> None:
        """Import and report."""
        self._inner.import_state(data, digest)
        self._moved("import")

    def _moved(self, how: Literal["start", "apply", "import"]) -> None:
        inner = self._inner
        counts, num_microbatches = self._made.get(inner.digest, ((), 0))
        self._report(
            Moved(
                trio.current_time(),
                self._node,
                how,
                self._stage,
                inner.step,
                inner.digest,
                counts,
                num_microbatches,
            )
        )


@dataclass
class Witness:
    """All moves of all nodes, in order."""

    trace: Trace
    moves: list[Moved] = field(default_factory=list)
    made: Made = field(default_factory=dict)

    def watching(
        self,
        node: str,
        factory: Callable[[int], BlockStage | EdgeStage],
        then: Callable[[], None],
    ) -> Callable[[int], BlockStage | EdgeStage]:
        """Return ``factory`` with every stage it makes under watch."""

        def report(moved: Moved) -> None:
            self.moves.append(moved)
            self.trace.add(node, moved.how, moved.stage, moved.step, moved.digest)
            then()

        def make(stage: int) -> BlockStage | EdgeStage:
            watched = WatchedStage(stage, factory(stage), report, node, self.made)
            return cast(BlockStage | EdgeStage, watched)

        return make
