"""When a holder goes to another stage (GWTF spec 1.5): seldom, alone, and only for much.

A holder moves only if the narrowest stage becomes at least 10 % wider, its own stage keeps two
others, its cool-down is over, and it saw the same gap several times. In the whole swarm one node
moves at a time: whoever sees a firm claim of another mover, or one of a lower rank, stays. So a gap
that does not exist, seen through a stale or parted registry, moves one node at most; and a claim
stands for a while after the move, until everybody sees the mover where it went.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.joining.claims import rank
from protocol.joining.summaries import Standing, Summaries
from protocol.records import Claim


@dataclass(frozen=True, slots=True)
class MigrationRules:
    """``num_looks`` is how often in a row a gap must be seen; the cool-down is SWARM's."""

    least_gain: float = 0.1
    least_left: int = 2
    num_looks: int = 3
    cool_down_s: float = 300.0


RULES = MigrationRules()


def may_move(
    summaries: Summaries,
    capacity: int,
    home: int,
    stage: int,
    rules: MigrationRules = RULES,
    there: int | None = None,
) -> bool:
    """Whether a holder of ``home`` with ``capacity`` flows may go to ``stage``.

    ``summaries`` count it at ``home``; at ``stage`` it carries ``there``, by default as many. The
    authority knows what it carries at home alone, so nobody should hope for more than that.
    """
    if stage == home or stage not in summaries.numbers or home not in summaries.numbers:
        return False
    if summaries[home].replicas - 1 < rules.least_left:
        return False
    after = summaries.minus(home, capacity).plus(stage, capacity if there is None else there)
    gained = after.narrowest - summaries.narrowest
    return gained > 0 and gained >= rules.least_gain * summaries.narrowest


def best_move(
    me: Standing,
    num_stages: int,
    others: Sequence[Standing],
    flows: Mapping[int, int],
    rules: MigrationRules = RULES,
) -> int | None:
    """The stage to go to, or None to stay; ``flows`` are those it could carry at each that fits.

    Who has a claim of its own moves unless it gives way.
    """
    if _gives_way(me, others):
        return None
    nodes = [*others, Standing(me.peer, me.stage, me.capacity)]
    summaries = Summaries.of(num_stages, nodes)
    for node in others:  # newcomers are on their way already, and cost nothing
        if node.is_newcomer and node.claim is not None and node.claim.stage in summaries.numbers:
            summaries = summaries.plus(node.claim.stage, node.capacity)
    moved = {
        stage: summaries.minus(me.stage, me.capacity).plus(stage, there).narrowest
        for stage, there in sorted(flows.items())
        if may_move(summaries, me.capacity, me.stage, stage, rules, min(me.capacity, there))
    }
    return max(moved, key=moved.__getitem__, default=None)


def vacancy(
    me: Standing, num_stages: int, others: Sequence[Standing], fits: Collection[int]
) -> int | None:
    """A stage that nobody serves, for a node that no decision names yet and whose stage has others.

    Newcomers that did not see each other may leave a stage empty, and then no step could open.
    """
    if _gives_way(me, others):
        return None
    summaries = Summaries.of(num_stages, others)
    claimed = {node.claim.stage for node in others if node.is_newcomer and node.claim is not None}
    if me.stage not in summaries.numbers or not summaries[me.stage].replicas:
        return None
    empty = (k for k in sorted(fits) if not summaries[k].replicas and k not in claimed)
    return next(empty, None)


def _gives_way(me: Standing, others: Sequence[Standing]) -> bool:
    """Whether somebody else is moving who comes first."""
    mine = rank(me.peer, me.claim.epoch) if me.claim else None
    return any(
        other.claim.is_firm or mine is None or rank(other.peer, other.claim.epoch) < mine
        for other in others
        if other.claim is not None and other.stage >= 1 and _is_of_mover(other, other.claim)
    )


def _is_of_mover(node: Standing, claim: Claim) -> bool:
    """A mover's claim; it stays firm for a while after the node has arrived."""
    return node.is_moving or claim.is_firm


@dataclass(slots=True)
class Gap:
    """Remembers how often in a row the same move looked right."""

    stage: int | None = None
    num_seen: int = field(default=0)

    def see(self, stage: int | None, rules: MigrationRules = RULES) -> bool:
        """Note what a look showed; return whether it has been seen often enough."""
        self.num_seen = self.num_seen + 1 if stage == self.stage else 1
        self.stage = stage
        return stage is not None and self.num_seen >= rules.num_looks
