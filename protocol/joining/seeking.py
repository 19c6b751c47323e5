"""A newcomer on its way to a stage: claim, wait, look again, and take it or claim another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.joining.claims import epoch_of
from protocol.joining.score import Newcomer, choose
from protocol.joining.summaries import Standing, Summaries
from protocol.keys import PeerId
from protocol.records import Claim

# Who was outrun so often takes what it claimed: a holder may move later.
MOST_LOOKS = 8
# A rival that has claimed the same thing at so many looks stays with it, whatever we think of it:
# it may fit nowhere else.
STEADY_LOOKS = 3


@dataclass(slots=True)
class Seeking:
    """Told what each look at the records showed; ``lease_s`` is how long a claim lasts.

    Two looks must be so far apart that what was written twice as late can be seen: then of two
    nodes at least the one that gives way has seen the other.
    """

    newcomer: Newcomer
    num_stages: int
    lease_s: float
    claim: Claim | None = None
    _num_looks: int = 0
    _seen: dict[PeerId, tuple[int, int]] = field(default_factory=dict)

    def look(self, others: Sequence[Standing], wall_s: float) -> int | None:
        """Return the stage to serve from now on, or None: publish ``claim``, wait, look again."""
        steady = self._steady(others)
        stage, is_sure = choose(self.newcomer, self.num_stages, others, self.claim, steady)
        self._num_looks += 1
        claim = self.claim
        if claim and ((is_sure and stage == claim.stage) or self._num_looks > MOST_LOOKS):
            return claim.stage
        epoch = claim.epoch if claim else epoch_of(wall_s, self.lease_s)
        self.claim = Claim(stage=stage, epoch=epoch, expires_at=wall_s + self.lease_s)
        return None

    def _steady(self, others: Sequence[Standing]) -> set[PeerId]:
        """Count at how many looks in a row each rival claimed what it claims now."""
        seen: dict[PeerId, tuple[int, int]] = {}
        for node in others:
            if node.is_newcomer and node.claim is not None:
                stage, times = self._seen.get(node.peer, (0, 0))
                claimed = node.claim.stage
                seen[node.peer] = claimed, times + 1 if stage == claimed else 1
        self._seen = seen
        return {peer for peer, (_, times) in seen.items() if times >= STEADY_LOOKS}


def reason_for(stage: int, num_stages: int, others: Sequence[Standing]) -> str:
    """Why a node goes to ``stage``, in words for its owner."""
    summaries = Summaries.of(num_stages, others)
    at_stage = summaries[stage]
    if not at_stage.replicas:
        return "nobody served it"
    if at_stage.replicas == 1:
        return "it had a single holder"
    if at_stage.capacity == summaries.narrowest < summaries.demand:
        return f"it was the narrowest, with room for {at_stage.capacity} microbatches"
    return "no stage was short of holders, and its path was the cheapest"
