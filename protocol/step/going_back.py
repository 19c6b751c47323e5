"""When a swarm goes back to an older step: a stage's state is lost, and disks have that step's.

Going back costs time and no correctness: what was drawn in a step is a function of its number, so
the steps are computed again to the same numbers (within the law). It is done

- at once when every member of the stage is there again and says that its disk lacks the state;
- otherwise after ``patience_s``, in which somebody who has the state may come.

The swarm goes back to the newest of its own decisions, as an authority's journal knows them, of
which every stage has a living node with the state. Step 0 is not among them: to begin from nothing
is the organiser's choice. An offer that turned out empty does not count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.step.candidate import Candidate

Offers = dict[str, tuple[int, set[PeerId]]]
"""By digest: the step of a state on disk, and who has it."""
Roster = list[tuple[PeerId, ...]]


class GoingBack:
    """Decides for one authority; ``history`` yields past decisions, the newest first."""

    def __init__(self, history: Callable[[], Iterable[Decision]], patience_s: float) -> None:
        self._history, self._patience_s = history, patience_s
        self._stuck_since: float | None = None
        self._looked_at: tuple[int, Offers] | None = None
        self._found: tuple[Decision, Roster] | None = None
        self._used: set[tuple[PeerId, str]] = set()
        self._goal = 0

    def on_decided(self, last: Decision | None, decision: Decision) -> None:
        """Remember whom the swarm believed when it went back, until it is a step further."""
        if last is not None and decision.step < last.step:
            self._goal = decision.step
            for digest, holders in zip(decision.digests, decision.roster, strict=True):
                self._used |= {(peer, digest) for peer in holders}
        elif decision.step > self._goal:
            self._used.clear()

    def look(
        self,
        current: Decision,
        stuck: Collection[int],
        candidates: Mapping[PeerId, Candidate],
        living: Callable[[PeerId], bool],
        now: float,
    ) -> tuple[Decision, Roster] | None:
        """Return the past decision to begin from again, and who has its states by stage."""
        if not stuck:
            self._stuck_since = self._looked_at = None
            return None
        if self._stuck_since is None:
            self._stuck_since = now
        is_overdue = now - self._stuck_since >= self._patience_s
        if not (is_overdue or all(_is_lost(current, stage, candidates, living) for stage in stuck)):
            return None
        offers = self._offers(candidates, living, now)
        if (current.term, offers) != self._looked_at:  # the journal is long
            self._looked_at = current.term, offers
            self._found = self._newest(current, offers)
        return self._found

    def _offers(
        self,
        candidates: Mapping[PeerId, Candidate],
        living: Callable[[PeerId], bool],
        now: float,
    ) -> Offers:
        offers: Offers = {}
        for peer, known in candidates.items():
            if not living(peer) or known.presence.is_draining or now < known.barred_until:
                continue
            for step, digest in known.presence.kept:
                if step > 0 and (peer, digest) not in self._used:
                    offers.setdefault(digest, (step, set()))[1].add(peer)
        return offers

    def _newest(self, current: Decision, offers: Offers) -> tuple[Decision, Roster] | None:
        oldest = min((step for step, _ in offers.values()), default=current.step)
        for past in self._history():
            if past.step < oldest:
                return None
            if past.step >= current.step or past.swarm != current.swarm:
                continue
            roster = [tuple(sorted(offers[d][1])) for d in past.digests if d in offers]
            if len(roster) == len(past.digests):
                return past, roster
        return None


def _is_lost(
    current: Decision,
    stage: int,
    candidates: Mapping[PeerId, Candidate],
    living: Callable[[PeerId], bool],
) -> bool:
    """Whether all of a stage's members are there and none of them has its state."""
    digest = current.digests[stage]
    return all(
        living(peer) and peer in candidates and candidates[peer].presence.lacks == digest
        for peer in current.roster[stage]
    )
