"""From what a stage without a state is rebuilt: the first of these that is there.

1. a living holder of the same stage: its state, to the bit
2. the copies of embedding and head that holders beside stage 0 keep, if the manifest shares them
3. with CheckFree+, for the ends and their neighbours: the twin's weights
4. with CheckFree, for a stage between two others: the weighted mean of both, at one step
5. a sparse checkpoint of the stage, older than the others' states
6. nothing: refused, with the reason. Weights are never drawn at random, and a stage that has no
   state itself is never averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.keys import PeerId
from protocol.manifest import RecoverySpec
from protocol.recovery.order import twin_of


@dataclass(frozen=True)
class Holding:
    """A living holder and the steps whose state it can give; none for one that is empty."""

    peer: PeerId
    steps: tuple[int, ...] = ()


@dataclass(frozen=True)
class Situation:
    """Who lives, by stage 0..S, and what else there is to rebuild from."""

    recovery: RecoverySpec
    num_stages: int
    holders: Mapping[int, Sequence[Holding]]
    checkpoints: Mapping[int, Sequence[Holding]] = field(default_factory=dict)
    ends: Sequence[Holding] = ()  # copies of stage 0's state, kept beside it

    def with_state(self, stage: int) -> list[Holding]:
        """The stage's living holders that have a state."""
        return [holding for holding in self.holders.get(stage, ()) if holding.steps]

    def newest(self, *stages: int) -> int | None:
        """The newest step at which each of these stages has a state; None if there is none."""
        sets = [{step for h in self.with_state(stage) for step in h.steps} for stage in stages]
        return max(set.intersection(*sets), default=None)


@dataclass(frozen=True)
class Replicate:
    """Fetch the whole state of ``step`` from a holder of the same stage."""

    stage: int
    donor: PeerId
    step: int


@dataclass(frozen=True)
class FromEnds:
    """Fetch stage 0's state of ``step`` from who keeps a copy of it beside stage 0."""

    stage: int
    donor: PeerId
    step: int


@dataclass(frozen=True)
class CopyTwin:
    """Take the twin's weights of ``step``; the optimiser begins anew."""

    stage: int
    twin: int
    step: int


@dataclass(frozen=True)
class Average:
    """Take the weighted mean of both neighbours at ``step``; the optimiser begins anew."""

    stage: int
    below: int
    above: int
    step: int


@dataclass(frozen=True)
class FromCheckpoint:
    """Take the stage's own state of ``step``, older than the others', from a disk."""

    stage: int
    donor: PeerId
    step: int


@dataclass(frozen=True)
class Refuse:
    """Nothing to rebuild from; ``reason`` is for a person."""

    stage: int
    reason: str


Plan = Replicate | FromEnds | CopyTwin | Average | FromCheckpoint | Refuse


def plan(situation: Situation, stage: int) -> Plan:
    """Say from what a stage is rebuilt."""
    newest = _newest_holding(situation.with_state(stage))
    if newest is not None:
        return Replicate(stage, *newest)
    if stage == 0:
        return _plan_ends(situation)
    rebuilt = _copy_twin(situation, stage) or _average(situation, stage)
    return rebuilt or _checkpoint(situation, stage) or Refuse(stage, _reason(situation, stage))


def _plan_ends(situation: Situation) -> Plan:
    copy = _newest_holding(situation.ends) if situation.recovery.share_ends else None
    if copy is not None:
        return FromEnds(0, *copy)
    return _checkpoint(situation, 0) or Refuse(
        0, "no data node lives that has embedding and head; training waits until one is back"
    )


def _copy_twin(situation: Situation, stage: int) -> CopyTwin | None:
    twin = twin_of(situation.recovery, situation.num_stages, stage)
    step = None if twin is None else situation.newest(twin)
    return None if twin is None or step is None else CopyTwin(stage, twin, step)


def _average(situation: Situation, stage: int) -> Average | None:
    is_interior = 1 < stage < situation.num_stages
    if situation.recovery.method == "none" or not is_interior:
        return None
    step = situation.newest(stage - 1, stage + 1)
    return None if step is None else Average(stage, stage - 1, stage + 1, step)


def _checkpoint(situation: Situation, stage: int) -> FromCheckpoint | None:
    kept = _newest_holding(situation.checkpoints.get(stage, ()))
    return None if kept is None else FromCheckpoint(stage, *kept)


def _newest_holding(holdings: Sequence[Holding]) -> tuple[PeerId, int] | None:
    """Who can give the newest state, by PeerID among equals, and its step."""
    usable = [(-max(h.steps), h.peer) for h in holdings if h.steps]
    return (min(usable)[1], -min(usable)[0]) if usable else None


def _reason(situation: Situation, stage: int) -> str:
    """Why nothing is left for a stage 1..S."""
    lost = f"no holder of stage {stage} has its state, nobody kept a checkpoint of it"
    method, last = situation.recovery.method, situation.num_stages
    if method == "none":
        return f"{lost}, and the manifest sets no recovery.method"
    if stage in (1, last) and method == "checkfree":
        return f"{lost}, and only checkfree_plus restores the first and the last stage"
    needed = {k for k in (stage - 1, stage + 1) if 1 <= k <= last}
    empty = sorted(k for k in needed if situation.newest(k) is None)
    if empty:
        return f"{lost}, and its neighbours {', '.join(map(str, empty))} have none either"
    return f"{lost}, and its neighbours have no step in common"
