"""Who rebuilds a stage whose last holder is gone, and when what it made counts (CheckFree).

The authority names one node for each such stage, a while after the stage was deserted: a holder
that comes back has the state itself, what is rebuilt only resembles it. The node makes the state
out of those of the stages around it, and says so in its Presence. Then the same step begins anew,
under a decision that names the new state; there is one such decision, so all later holders have
its bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import Decision, Rebuilder
from protocol.recovery import Average, CopyTwin, Holding, Situation, plan
from protocol.step.candidate import Candidate


def can_rebuild(manifest: Manifest, current: Decision, lost: Collection[int]) -> bool:
    """Whether each of the ``lost`` stages can be made out of others; at step 0 the seed does."""
    situation = situation_of(manifest, current, lost)
    return current.step > 0 and all(
        isinstance(plan(situation, stage), Average | CopyTwin) for stage in lost
    )


def situation_of(manifest: Manifest, current: Decision, lost: Collection[int]) -> Situation:
    """Who has the state of which stage at the start of a step, when some stages have nobody."""
    holders = {
        stage: [] if stage in lost else [Holding(peer, (current.step,)) for peer in peers]
        for stage, peers in enumerate(current.roster)
    }
    return Situation(manifest.recovery, manifest.num_stages, holders)


@dataclass(slots=True)
class Rebuilds:
    """The nodes that were named, by stage. Times are monotonic.

    A stage is deserted for ``wait_s`` before somebody is named, who has ``obey_s`` to come and
    ``work_s`` in all.
    """

    wait_s: float
    obey_s: float
    work_s: float
    _deserted_since: dict[int, float] = field(default_factory=dict)
    _named: dict[int, tuple[PeerId, float]] = field(default_factory=dict)
    _failed: set[PeerId] = field(default_factory=set)

    def look(
        self,
        current: Decision,
        candidates: Mapping[PeerId, Candidate],
        living: Collection[PeerId],
        deserted: Collection[int],
        now: float,
    ) -> None:
        """Name a node for each stage that is due, and another one if the last is gone or slow."""
        self._deserted_since = {k: self._deserted_since.get(k, now) for k in sorted(deserted)}
        if not deserted:
            self._failed.clear()
        self._drop(candidates, living, now)
        for stage, since in self._deserted_since.items():
            if stage in self._named or now - since < self.wait_s:
                continue
            taken = self.busy | self._failed
            free = {p: c for p, c in candidates.items() if p in living and p not in taken}
            peer = whom_to_name(stage, current, free, living)
            if peer is None:
                self._failed.clear()  # better those again than nobody
            else:
                self._named[stage] = peer, now

    @property
    def named(self) -> tuple[Rebuilder, ...]:
        """Who rebuilds which stage, in the order of the stages."""
        return tuple(Rebuilder(stage=k, peer=self._named[k][0]) for k in sorted(self._named))

    def ready(
        self, current: Decision, candidates: Mapping[PeerId, Candidate]
    ) -> dict[int, tuple[PeerId, str]]:
        """The deserted stages whose new state is there: its holder and its digest."""
        return {
            stage: (peer, digest)
            for stage, (peer, _) in self._named.items()
            if (digest := _rebuilt(candidates.get(peer), stage, current)) is not None
        }

    @property
    def busy(self) -> set[PeerId]:
        """Those who were named."""
        return {peer for peer, _ in self._named.values()}

    def _drop(
        self, candidates: Mapping[PeerId, Candidate], living: Collection[PeerId], now: float
    ) -> None:
        for stage, (peer, since) in list(self._named.items()):
            obeys = peer in candidates and candidates[peer].presence.stage == stage
            is_late = now - since >= (self.work_s if obeys else self.obey_s)
            if stage not in self._deserted_since or peer not in living or is_late:
                del self._named[stage]
                self._failed |= {peer} if is_late else set()


def _rebuilt(known: Candidate | None, stage: int, current: Decision) -> str | None:
    """The digest of what a named node made of this very stage for this very step."""
    if known is None or not known.presence.is_rebuilt:
        return None
    said = known.presence
    is_current = (said.stage, said.step) == (stage, current.step)
    return said.digest if is_current and tuple(said.seen) == current.order else None


def whom_to_name(
    stage: int,
    current: Decision,
    free: Mapping[PeerId, Candidate],
    living: Collection[PeerId],
) -> PeerId | None:
    """A newcomer to this stage, else any other newcomer, else a holder whose stage has most.

    The lowest PeerID among equals. No stage loses its last holder, and nobody goes whose owner
    named another stage.
    """
    held = {p: k for k, holders in enumerate(current.roster) for p in holders if p in living}
    num_held = Counter(held.values())
    willing = {
        peer: known.presence
        for peer, known in free.items()
        if not known.presence.is_draining
        and known.presence.stage != 0
        and not (known.presence.is_bound and known.presence.stage != stage)
        and (peer not in held or num_held[held[peer]] > 1)
    }
    return min(
        willing,
        key=lambda p: (p in held, -num_held[held[p]] if p in held else 0,
                       willing[p].stage != stage, p),
        default=None,
    )  # fmt: skip
