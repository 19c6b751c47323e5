"""The messages by which a swarm agrees on who takes part, and on steps that open and end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.keys import PeerId
from protocol.messages.base import (
    Count,
    Digest,
    Message,
    Path,
    Peer,
    Signature,
    Stage,
)

MOST_KEPT = 16  # states on disk that a Presence names


class Presence(Message):
    """Node -> authorities, about once a second: who I am, what I hold. Soft state, idempotent.

    ``step`` and ``digest`` name the state that the node holds; ``stage`` is -1 while it has none;
    ``seen`` is the order (step, term) of the last decision that the node obeys, (0, 0) for none.
    ``is_restarted``: it is a member there and lost what it did in an earlier life.
    ``asks_stage``: it cannot read the registry, and so not choose a stage itself.
    ``moves_to``: a member that would serve another stage from the next step on, -1 for none.
    ``lacks``: the decided state that it sought on its disk and has not. While the swarm is paused
    ``kept`` names decided states of its stage that it has there, (step, digest), the newest first.
    ``is_bound``: its owner named its stage, so it serves no other one.
    ``is_rebuilt``: ``digest`` is that of a state which it rebuilt because nobody has it any more.
    """

    kind: Literal["presence"] = "presence"
    stage: Annotated[int, Field(ge=-1, lt=4096)]
    capacity: Count
    digest: Digest | None
    seen: tuple[Count, Count] = (0, 0)
    wants_hold: bool = False
    is_draining: bool = False
    is_restarted: bool = False
    asks_stage: bool = False
    moves_to: Annotated[int, Field(ge=-1, lt=4096)] = -1
    lacks: Digest | None = None
    kept: Annotated[tuple[tuple[Count, Digest], ...], Field(max_length=MOST_KEPT)] = ()
    is_bound: bool = False
    is_rebuilt: bool = False


class Assign(Message):
    """Authority -> node that asks for a stage, because it cannot choose one: serve this one."""

    kind: Literal["assign"] = "assign"
    stage: Stage


class Rebuilder(BaseModel):
    """The node that is to rebuild a stage whose last holder is gone."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: Stage
    peer: Peer


class Paused(Message):
    """Authority -> node, in answer to each Presence meanwhile: the step in flight cannot end.

    ``deserted`` stages have no living holder, ``stateless`` ones none with the state that the step
    starts from. Who drains does not wait for the step. ``rebuilders`` are to rebuild a deserted
    stage, those among them that serve another one now too.
    """

    kind: Literal["paused"] = "paused"
    deserted: Annotated[tuple[Stage, ...], Field(max_length=4096)] = ()
    stateless: Annotated[tuple[Stage, ...], Field(max_length=4096)] = ()
    rebuilders: Annotated[tuple[Rebuilder, ...], Field(max_length=4096)] = ()


class Share(BaseModel):
    """The slots of a step that one data node draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    data_node: Peer
    slots: Annotated[tuple[Count, ...], Field(max_length=2**20)]


class Decision(BaseModel):
    """The content of STEP_OPEN: who belongs to a step, who draws what, which states it starts from.

    Terms start at 1 and rise with every decision; steps rise unless the swarm has to go back.
    ``roster[k]`` lists the holders of stage k (0: data nodes), sorted;
    ``digests[k]`` is the state of stage k at the start of ``step``, so opening step s+1 is also
    the word that applies step s. ``is_final`` ends the training: nothing is drawn any more.
    ``begun`` is the term under which work last began anew, 0 if it never did: what was done before
    is void, because a data node that nobody can replace lost its part of the step, because a stage
    was rebuilt, or because the swarm went back to an older step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    swarm: Digest
    step: Count
    term: Count
    ballot: Count
    roster: Annotated[tuple[Path, ...], Field(max_length=4096)]
    shares: Annotated[tuple[Share, ...], Field(max_length=4096)]
    digests: Annotated[tuple[Digest, ...], Field(max_length=4096)]
    is_final: bool = False
    begun: Count = 0

    @property
    def order(self) -> tuple[int, int]:
        """Step and term, which name a decision."""
        return self.step, self.term

    def follows(self, other: Decision | None) -> bool:
        """Whether it is later than another one."""
        return other is None or self.term > other.term

    @property
    def work(self) -> tuple[int, int]:
        """What two decisions share if the second one goes on with the work of the first."""
        return self.step, self.begun

    def stage_of(self, peer: str) -> int | None:
        """Return the stage that ``peer`` serves in this step, or None if it has no part in it."""
        return next((k for k, holders in enumerate(self.roster) if peer in holders), None)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Everybody who belongs to the step."""
        return tuple(peer for holders in self.roster for peer in holders)

    @property
    def data_nodes(self) -> tuple[PeerId, ...]:
        """The holders of stage 0."""
        return self.roster[0]


class Vote(BaseModel):
    """One authority's signature on a decision."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    authority: Peer
    signature: Signature


class StepOpen(Message):
    """Authority -> everyone: a decision with the signatures of a majority of the authorities."""

    kind: Literal["step_open"] = "step_open"
    decision: Decision
    votes: Annotated[tuple[Vote, ...], Field(max_length=64)]


class Prepare(Message):
    """Authority -> authorities: let me lead under this ballot (phase 1)."""

    kind: Literal["prepare"] = "prepare"
    ballot: Count


class Promise(Message):
    """Answer to Prepare: the highest ballot promised, and what was accepted last."""

    kind: Literal["promise"] = "promise"
    ballot: Count
    is_granted: bool
    accepted: StepOpen | None


class Accept(Message):
    """Leading authority -> authorities: vote for this decision (phase 2)."""

    kind: Literal["accept"] = "accept"
    decision: Decision


class Accepted(Message):
    """Answer to Accept: the vote, or the higher ballot that stands in the way."""

    kind: Literal["accepted"] = "accepted"
    ballot: Count
    term: Count
    vote: Vote | None


class Prepared(Message):
    """Member -> authorities: my next state is ready, complete and not yet applied."""

    kind: Literal["prepared"] = "prepared"
    term: Count
    stage: Stage
    digest: Digest


class Applied(Message):
    """Member -> authorities: my state is now the one at the start of ``step``."""

    kind: Literal["applied"] = "applied"
    stage: Stage
    digest: Digest


class Suspect(Message):
    """Member -> authorities: I cannot work with this peer."""

    kind: Literal["suspect"] = "suspect"
    term: Count
    peer: Peer
    reason: Annotated[str, Field(max_length=200)]
