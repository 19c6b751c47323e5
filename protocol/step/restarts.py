"""What becomes of a step when members of it were started again and lost what they had done in it.

Where another holder of their stage went on, they are left out and come back as joiners. Where all
were started again nobody else can go on, and the step is opened again with them: under a new term,
in which holders recompute what they lost from their neighbours. A data node's part nobody can
recompute, so with one of those the whole step begins anew.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.step.candidate import Candidate


@dataclass(frozen=True, slots=True)
class Restart:
    """Who is left out, and whether the step begins anew."""

    replaced: frozenset[PeerId] = frozenset()
    begins_anew: bool = False


def restarted(current: Decision, candidates: Mapping[PeerId, Candidate]) -> set[PeerId]:
    """Members that say of the current decision that an earlier life of theirs worked under it."""
    return {
        peer for peer in _informed(current, candidates) if candidates[peer].presence.is_restarted
    }


def _informed(current: Decision, candidates: Mapping[PeerId, Candidate]) -> set[PeerId]:
    """Members that have answered to the current decision; the others may turn out to be new."""
    return {
        peer
        for peer in current.members
        if peer in candidates and tuple(candidates[peer].presence.seen) == current.order
    }


def after_restart(
    current: Decision,
    candidates: Mapping[PeerId, Candidate],
    living: Container[PeerId],
) -> Restart | None:
    """What to do about members that lost their work; None if nobody did or it is not known yet."""
    lost = restarted(current, candidates)
    if not lost:
        return None
    stages = [set(holders) for holders in current.roster if lost & set(holders)]
    others = {peer for stage in stages for peer in stage - lost if peer in living}
    went_on = others & _informed(current, candidates)
    replaced = frozenset(p for stage in stages if stage & went_on for p in stage & lost)
    if replaced:
        return Restart(replaced=replaced)
    return None if others else Restart(begins_anew=bool(lost & set(current.data_nodes)))
