"""Where a newcomer helps most: the score of each stage (GWTF spec 1.5, derived form).

Stages are compared by, in this order,

1. whether the newcomer restores one that has at most one replica,
2. the flows that the swarm gains: dF(s) = min(D, min over stages with Cap_s + kappa) - F,
3. how narrow the stage is, as far as it limits the flow at all: -min(D, Cap_s),
4. the cost that the flows may be spared: -E[dCost].

The third is ours. Where two stages are equally the narrowest, one newcomer alone gains nothing at
either of them: dF is 0 everywhere, and without it a whole crowd would go where links are cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.joining.claims import Rival, rank
from protocol.joining.summaries import Standing, Summaries
from protocol.keys import PeerId
from protocol.records import Claim

NOISE = 0.1
# The one-way time of a small frame to a peer, None where nothing was measured.
LinkCost = Callable[[PeerId], float | None]


class Score(NamedTuple):
    """What a newcomer is worth at a stage; the greater, the better."""

    restores: bool
    gained_flows: int
    narrowness: int
    spared_s: float

    @property
    def need(self) -> tuple[bool, int, int]:
        """What all nodes see alike: the cost depends on where one is."""
        return self.restores, self.gained_flows, self.narrowness


class Choice(NamedTuple):
    """A stage, and whether all who come first stay with what they claim."""

    stage: int
    is_sure: bool


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Who looks for a stage: the flows it could carry at each that fits its memory, its links."""

    peer: PeerId
    flows: Mapping[int, int]
    link_s: LinkCost = lambda peer: None


def score(summaries: Summaries, stage: int, capacity: int, spared_s: float = 0.0) -> Score:
    """What ``capacity`` more flows at ``stage`` are worth."""
    gained = summaries.plus(stage, capacity).flow - summaries.flow
    at_stage = summaries[stage]
    narrowness = -min(summaries.demand, at_stage.capacity)
    return Score(at_stage.replicas <= 1, gained, narrowness, spared_s)


def spared_s(
    newcomer: Newcomer, stage: int, summaries: Summaries, nodes: Sequence[Standing]
) -> float:
    """-E[dCost]: what a flow that crosses ``stage`` is spared, if it may pass the newcomer instead.

    From here a flow goes on to whichever sampled peer of the next stage is the cheapest. Flows
    spread by capacity, so that share of them comes this way. 0 where too little is known. Rounded
    to ``NOISE`` of a whole path's cost: for less than that nobody goes anywhere.
    """
    at_stage = summaries[stage]
    next_stage = stage + 1 if stage < len(summaries.stages) else 0
    costs = [
        link_s + (node.cost_s or 0.0)
        for node in nodes
        if node.stage == next_stage and (node.cost_s is not None or next_stage == 0)
        if (link_s := newcomer.link_s(node.peer)) is not None
    ]
    if at_stage.cost_s is None or not costs:
        return 0.0
    flows = newcomer.flows[stage]
    share = flows / (flows + at_stage.capacity)
    noise_s = NOISE * max(each.cost_s or 0.0 for each in summaries.stages)
    return round(share * (at_stage.cost_s - min(costs)) / noise_s) * noise_s if noise_s else 0.0


def choose(
    newcomer: Newcomer,
    num_stages: int,
    nodes: Sequence[Standing],
    claim: Claim | None = None,
    steady: Collection[PeerId] = (),
) -> Choice:
    """The stage to go to, given what the other nodes hold and claim; ``claim`` is one's own.

    Those who claim and give way to nobody here are placed one by one, as if they had come one by
    one: where they claim to go, or where they will go if they claim what is not needed most. Who
    is ``steady`` goes where it claims to go. A claim that is as good as any other is kept.
    """
    others = [node for node in nodes if node.peer != newcomer.peer]
    summaries, is_sure = Summaries.of(num_stages, others), True
    for rival in _before(newcomer.peer, others, claim):
        goes_to = claimed = rival.claim.stage
        if rival.peer not in steady or claimed not in summaries.numbers:
            goes_to = _needed(summaries, summaries.numbers, rival.capacity, claimed)
        is_sure = is_sure and goes_to == claimed
        summaries = summaries.plus(goes_to, rival.capacity)
    worth = {stage: _worth(newcomer, stage, summaries, others) for stage in sorted(newcomer.flows)}
    best = max(worth, key=worth.__getitem__)
    if claim is not None and worth.get(claim.stage) == worth[best]:
        best = claim.stage
    return Choice(best, is_sure)


def _worth(
    newcomer: Newcomer, stage: int, summaries: Summaries, nodes: Sequence[Standing]
) -> tuple[Score, int]:
    """The score, and where that is equal the stage with the least capacity first."""
    spared = spared_s(newcomer, stage, summaries, nodes)
    return score(summaries, stage, newcomer.flows[stage], spared), -summaries[stage].capacity


def _before(me: PeerId, others: Sequence[Standing], claim: Claim | None) -> list[Rival]:
    """The newcomers that come before this one; all of them, while it has claimed nothing itself."""
    rivals = [
        Rival(node.peer, node.claim, node.capacity)
        for node in others
        if node.is_newcomer and node.claim is not None
    ]
    mine = rank(me, claim.epoch) if claim else None
    before = [rival for rival in rivals if mine is None or rival.rank < mine]
    return sorted(before, key=lambda rival: rival.rank)


def _needed(summaries: Summaries, fits: Collection[int], capacity: int, claimed: int) -> int:
    """The claimed stage if it is needed as much as any, else the first that is needed most."""
    needs = {stage: score(summaries, stage, capacity).need for stage in sorted(fits)}
    most = max(needs.values())
    if needs.get(claimed) == most:
        return claimed
    return next(stage for stage, need in needs.items() if need == most)
