"""What the records of all nodes add up to, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from protocol.joining.claims import is_live
from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.records import Claim, NodeRecord

# Nobody knows what the data nodes want: the stages alone limit the flow.
UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one node stands: ``stage`` -1 for none yet; ``claim`` only while it is live.

    ``capacity`` and ``used`` count flows; a data node's capacity is what it wants.
    """

    peer: PeerId
    stage: int
    capacity: int
    used: int = 0
    cost_s: float | None = None
    claim: Claim | None = None

    @property
    def is_moving(self) -> bool:
        """Whether it holds a stage and means to leave it for another."""
        return self.stage >= 1 and self.claim is not None and self.claim.stage != self.stage

    @property
    def is_newcomer(self) -> bool:
        """Whether it has no stage yet and claims one."""
        return self.stage == -1 and self.claim is not None


@dataclass(frozen=True, slots=True)
class Summary:
    """One stage: what its holders carry together, and what a flow costs from here on."""

    capacity: int = 0
    used: int = 0
    replicas: int = 0
    cost_s: float | None = None


@dataclass(frozen=True, slots=True)
class Summaries:
    """The stages 1..S, and the demand of the data nodes."""

    stages: tuple[Summary, ...]
    demand: int

    def __getitem__(self, stage: int) -> Summary:
        return self.stages[stage - 1]

    @property
    def numbers(self) -> range:
        """The numbers of the stages, 1..S."""
        return range(1, len(self.stages) + 1)

    @property
    def narrowest(self) -> int:
        """The least capacity of any stage."""
        return min(stage.capacity for stage in self.stages)

    @property
    def flow(self) -> int:
        """F, the flows that the swarm can carry and wants."""
        return min(self.demand, self.narrowest)

    def plus(self, stage: int, capacity: int) -> Summaries:
        """The same with one more holder."""
        return self._changed(stage, capacity, 1)

    def minus(self, stage: int, capacity: int) -> Summaries:
        """The same with one holder less."""
        return self._changed(stage, -capacity, -1)

    def _changed(self, stage: int, capacity: int, replicas: int) -> Summaries:
        old = self[stage]
        new = replace(
            old, capacity=max(0, old.capacity + capacity), replicas=max(0, old.replicas + replicas)
        )
        stages = (*self.stages[: stage - 1], new, *self.stages[stage:])
        return replace(self, stages=stages)

    @classmethod
    def of(cls, num_stages: int, nodes: Iterable[Standing]) -> Summaries:
        """Add up who holds what; a firm claim counts where it leads."""
        held: list[list[Standing]] = [[] for _ in range(num_stages + 1)]
        for node in nodes:
            stage = node.stage
            if node.is_moving and node.claim is not None and node.claim.is_firm:
                stage = node.claim.stage
            if 0 <= stage <= num_stages:
                held[stage].append(node)
        demand = sum(node.capacity for node in held[0]) if held[0] else UNLIMITED
        return cls(tuple(map(_summary, held[1:])), demand)


def _summary(holders: Sequence[Standing]) -> Summary:
    costs = [node.cost_s for node in holders if node.cost_s is not None]
    return Summary(
        capacity=sum(node.capacity for node in holders),
        used=sum(node.used for node in holders),
        replicas=len(holders),
        cost_s=sum(costs) / len(costs) if costs else None,
    )


def flows_of(capacity: int) -> int:
    """The flows of a holder that can hold ``capacity`` microbatches: one place is for repair."""
    return max(1, capacity - 1)


def standings(
    records: Iterable[NodeRecord], decision: Decision | None, wall_s: float, *, usual: int
) -> list[Standing]:
    """What the records say of the other nodes, corrected by the decision that is in force.

    A record may be old, and a look into the registry may miss some: who is a member, and of which
    stage, the decision knows better. A member without a record counts with ``usual`` flows. Who
    drains counts no more, nor does who serves a stage and is neither a member nor claims anything:
    whoever is on its way claims, and a record outlives the node that died by half a minute.
    """
    members = {
        p: k for k, holders in enumerate(decision.roster if decision else ()) for p in holders
    }
    found: dict[PeerId, Standing] = {}
    for record in records:
        if record.expires_at <= wall_s:
            continue
        if record.is_draining:
            members.pop(record.peer_id, None)
            continue
        node = _standing(record, members, wall_s)
        if decision is None or node.peer in members or node.stage < 1 or node.claim is not None:
            found[node.peer] = node
    unseen = [
        Standing(peer, stage, usual if stage else UNLIMITED)
        for peer, stage in members.items()
        if peer not in found
    ]
    return [*found.values(), *unseen]


def _standing(record: NodeRecord, members: dict[PeerId, int], wall_s: float) -> Standing:
    claim = record.claim
    return Standing(
        peer=record.peer_id,
        stage=members.get(record.peer_id, record.stage),
        capacity=record.capacity,
        used=record.used,
        cost_s=None if record.cost_ms is None else record.cost_ms / 1000,
        claim=claim if claim is not None and is_live(claim, wall_s) else None,
    )
