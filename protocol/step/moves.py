"""Who stays in the roster when the next step opens: nodes that drain leave, one may move.

A holder that would serve another stage asks for it in its Presence, and moves when a step opens
without it. The authority grants that by the same rule by which the holder chose to ask
(``joining.migration``), applied to what it knows itself: the roster, and the presences of those on
their way. So a gap that only looks like one, because somebody's registry is stale or parted, moves
nobody, and no stage is left with fewer than two holders however many would move. One node is let
go at each opening: the next look takes it into account.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from protocol.joining import Standing, Summaries, flows_of, may_move
from protocol.keys import PeerId
from protocol.step.candidate import Candidate

Roster = Sequence[tuple[PeerId, ...]]


def next_roster(
    roster: Roster, candidates: Mapping[PeerId, Candidate], living: Collection[PeerId]
) -> list[tuple[PeerId, ...]]:
    """The roster of the next step. A stage never loses its last holders, they drain in vain."""
    staying = [_without_draining(holders, candidates) for holders in roster]
    mover = released(staying, candidates, living)
    return [tuple(peer for peer in holders if peer != mover) for holders in staying]


def released(
    roster: Roster, candidates: Mapping[PeerId, Candidate], living: Collection[PeerId]
) -> PeerId | None:
    """The member that may move now, the lowest PeerID among several; nobody if one is unknown."""
    wishes = _wishes(roster, candidates)
    if not wishes or any(peer not in candidates for holders in roster for peer in holders):
        return None
    held = [(peer, stage) for stage, holders in enumerate(roster) for peer in holders]
    coming = [(p, c.presence.stage) for p, c in candidates.items() if p in living]
    stages = {**dict(coming), **dict(held)}
    summaries = Summaries.of(
        len(roster) - 1,
        [Standing(p, stage, _flows(candidates[p])) for p, stage in stages.items()],
    )
    return next(
        (
            peer
            for peer, goal in sorted(wishes.items())
            if may_move(summaries, _flows(candidates[peer]), stages[peer], goal)
        ),
        None,
    )


def _wishes(roster: Roster, candidates: Mapping[PeerId, Candidate]) -> dict[PeerId, int]:
    """Who would move where."""
    members = (peer for holders in roster[1:] for peer in holders if peer in candidates)
    wishes = {peer: candidates[peer].presence.moves_to for peer in members}
    return {peer: goal for peer, goal in wishes.items() if goal >= 1}


def _flows(candidate: Candidate) -> int:
    return flows_of(candidate.presence.capacity)


def _without_draining(
    holders: Sequence[PeerId], candidates: Mapping[PeerId, Candidate]
) -> tuple[PeerId, ...]:
    staying = tuple(p for p in holders if not _drains(candidates.get(p)))
    return staying or tuple(holders)


def _drains(candidate: Candidate | None) -> bool:
    return candidate is not None and candidate.presence.is_draining
