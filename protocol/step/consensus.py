"""How the authorities agree on decisions: Paxos on one register whose value only moves on.

Leadership is by ballot: ballot b belongs to authority b mod n. A new leader first learns, from a
majority, what may already be chosen (Prepare/Promise), chooses that again under its own ballot,
and then goes on from it. An authority never votes under a ballot lower than one it promised, and
under one ballot never for a decision that is not later than the one it accepted. With one
authority all of this is one vote by itself. Source: Lamport, "Paxos Made Simple" (2001), section
2; the register that moves on is that of Rystsov, "CASPaxos" (2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.keys import NodeKey, PeerId, is_signed_by
from protocol.messages import Accept, Accepted, Decision, Prepare, Promise, StepOpen, Vote
from protocol.step.decision import decision_bytes, majority, vote


def leader_of(ballot: int, authorities: Sequence[PeerId]) -> PeerId:
    """Return the authority that a ballot belongs to."""
    return authorities[ballot % len(authorities)]


def next_ballot(after: int, me: PeerId, authorities: Sequence[PeerId]) -> int:
    """Return the lowest ballot of ``me`` that is higher than ``after``."""
    ballot = after + 1
    return ballot + (authorities.index(me) - ballot) % len(authorities)


@dataclass(slots=True)
class Acceptor:
    """One authority's memory of what it promised and accepted. Must be durable before it speaks."""

    key: NodeKey
    authorities: Sequence[PeerId]
    promised: int = 0
    accepted: StepOpen | None = None

    def on_prepare(self, message: Prepare, sender: PeerId) -> Promise:
        """Promise the ballot, unless a higher one was promised or it is not the sender's."""
        is_granted = (
            message.ballot > self.promised and leader_of(message.ballot, self.authorities) == sender
        )
        if is_granted:
            self.promised = message.ballot
        step = self.accepted.step if self.accepted else 0
        return Promise(
            step=step, ballot=self.promised, is_granted=is_granted, accepted=self.accepted
        )

    def on_accept(self, message: Accept, sender: PeerId) -> Accepted:
        """Vote for the decision if its ballot stands and its leader has not gone on from it."""
        decision = message.decision
        if self._may_accept(decision, sender):
            self.promised = decision.ballot
            mine = vote(decision, self.key)
            self.accepted = StepOpen(step=decision.step, decision=decision, votes=(mine,))
            return self._answer(decision, mine)
        return self._answer(decision, None)

    def _answer(self, decision: Decision, mine: Vote | None) -> Accepted:
        return Accepted(step=decision.step, term=decision.term, ballot=self.promised, vote=mine)

    def _may_accept(self, decision: Decision, sender: PeerId) -> bool:
        if decision.ballot < self.promised:
            return False
        if leader_of(decision.ballot, self.authorities) != sender:
            return False
        if self.accepted is None:
            return True
        last = self.accepted.decision
        if decision.ballot > last.ballot:
            # its leader has asked a majority what may be chosen: what only I accepted is not
            return True
        return decision.follows(last) or decision == last


@dataclass(slots=True)
class Proposal:
    """A leader's count of the votes for one decision."""

    decision: Decision
    authorities: Sequence[PeerId]
    votes: dict[PeerId, Vote] = field(default_factory=dict)
    highest_ballot: int = 0

    def on_accepted(self, message: Accepted, sender: PeerId) -> None:
        """Count an answer to the Accept of this decision, if it is a vote for just this one.

        A late vote for the same order under an older ballot is none: it signs other bytes.
        """
        self.highest_ballot = max(self.highest_ballot, message.ballot)
        mine = message.vote
        if mine is None or mine.authority != sender or sender not in self.authorities:
            return
        if is_signed_by(sender, decision_bytes(self.decision), mine.signature):
            self.votes[sender] = mine

    @property
    def chosen(self) -> StepOpen | None:
        """The signed decision once a majority voted for it."""
        if len(self.votes) < majority(self.authorities):
            return None
        votes = tuple(self.votes[peer] for peer in sorted(self.votes))
        return StepOpen(step=self.decision.step, decision=self.decision, votes=votes)

    @property
    def is_superseded(self) -> bool:
        """Whether an authority answered with a higher ballot: somebody else leads."""
        return self.highest_ballot > self.decision.ballot


@dataclass(slots=True)
class Campaign:
    """A would-be leader's count of the promises for its ballot."""

    ballot: int
    authorities: Sequence[PeerId]
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    highest_ballot: int = 0

    def on_promise(self, message: Promise, sender: PeerId) -> None:
        """Count an answer to the Prepare of this ballot."""
        self.highest_ballot = max(self.highest_ballot, message.ballot)
        if message.is_granted and message.ballot == self.ballot:
            self.promises[sender] = message

    @property
    def is_won(self) -> bool:
        """Whether a majority promised."""
        return len(self.promises) >= majority(self.authorities)

    def inherited(self) -> Decision | None:
        """What may already be chosen: the accepted decision of the highest (ballot, term)."""
        accepted = [p.accepted.decision for p in self.promises.values() if p.accepted]
        return max(accepted, key=lambda d: (d.ballot, d.term), default=None)
