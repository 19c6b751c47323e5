"""What the next decision says, once it is known who stays, who comes and what was prepared."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from protocol.keys import PeerId
from protocol.manifest import TrainingSpec
from protocol.messages import Decision, Prepared
from protocol.step.decision import share_slots

Roster = Sequence[tuple[PeerId, ...]]


def first_step(
    swarm: str, ballot: int, training: TrainingSpec, roster: Roster, digests: Sequence[str]
) -> Decision:
    """Open step 0 from the states that follow from the seed."""
    shares = share_slots(training.quota, roster[0])
    return Decision(
        swarm=swarm, step=0, term=1, ballot=ballot,
        roster=tuple(roster), shares=shares, digests=tuple(digests),
    )  # fmt: skip


def same_step(
    current: Decision,
    ballot: int,
    training: TrainingSpec,
    remove: Collection[PeerId],
    add: Mapping[PeerId, int],
) -> Decision:
    """Open the same step again under the next term; what was done in it stays.

    Who is in both, ``remove`` and ``add``, goes to another stage.
    """
    roster = tuple(
        tuple(sorted((set(holders) - set(remove)) | {p for p, s in add.items() if s == stage}))
        for stage, holders in enumerate(current.roster)
    )
    shares = tuple(s for s in current.shares if s.data_node in roster[0])
    if not any(s.slots for s in shares) and not current.is_final:
        shares = share_slots(training.quota, roster[0])
    changes = {"term": current.term + 1, "ballot": ballot, "roster": roster, "shares": shares}
    return current.model_copy(update=changes)


def anew(
    decision: Decision, training: TrainingSpec, digests: Mapping[int, str] | None = None
) -> Decision:
    """Nothing counts that was done in this step before; some stages may start from new states."""
    changed = digests or {}
    return decision.model_copy(
        update={
            "begun": decision.term,
            "shares": () if decision.is_final else share_slots(training.quota, decision.data_nodes),
            "digests": tuple(changed.get(k, d) for k, d in enumerate(decision.digests)),
        }
    )


def next_step(
    current: Decision,
    ballot: int,
    training: TrainingSpec,
    roster: Roster,
    prepared: Sequence[Prepared],
) -> Decision:
    """Open step s+1 from what every stage prepared; ``prepared[k]`` is the word of stage k."""
    step = current.step + 1
    is_final = step >= training.steps
    return Decision(
        swarm=current.swarm,
        step=step,
        term=current.term + 1,
        ballot=ballot,
        roster=tuple(roster),
        shares=() if is_final else share_slots(training.quota, roster[0]),
        digests=tuple(p.digest for p in prepared),
        is_final=is_final,
        begun=current.begun,
    )


def past_step(current: Decision, ballot: int, past: Decision, roster: Roster) -> Decision:
    """Open an older step again, with those who have its states."""
    changes = {"term": current.term + 1, "ballot": ballot, "roster": tuple(roster)}
    return past.model_copy(update=changes)
