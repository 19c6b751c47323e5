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
    """Who is left out, whether the step begins anew, or that somebody may still come back."""

    replaced: frozenset[PeerId] = frozenset()
    begins_anew: bool = False
    must_wait: bool = False


def restarted(current: Decision, candidates: Mapping[PeerId, Candidate]) -> set[PeerId]:
    """Members that say of the current decision that an earlier life of theirs worked under it."""
    return {
        peer
        for peer in current.members
        if (known := candidates.get(peer)) is not None
        and known.presence.is_restarted
        and tuple(known.presence.seen) == current.order
    }


def after_restart(
    current: Decision,
    lost: set[PeerId],
    heard_of: Container[PeerId],
    living: Container[PeerId],
) -> Restart | None:
    """What to do about the members that ``lost`` their work; None if nobody did."""
    if not lost:
        return None
    stages = [set(holders) for holders in current.roster if lost & set(holders)]
    others = {peer for stage in stages for peer in stage - lost if peer in living}
    went_on = {peer for peer in others if peer in heard_of}
    replaced = frozenset(p for stage in stages if stage & went_on for p in stage & lost)
    if replaced:
        return Restart(replaced=replaced)
    if others:
        return Restart(must_wait=True)
    return Restart(begins_anew=bool(lost & set(current.data_nodes)))
