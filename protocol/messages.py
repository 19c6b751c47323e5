"""Every message between nodes: frozen models that refuse unknown fields.

A message is a small header; tensors travel beside it as raw bytes (``wire`` turns both into a
frame). Each type names its lane (control and bulk never share a connection) and how many tensors
it carries. ``step`` and ``epoch`` (of the transforms) are on every message: a mismatch is refused.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.averaging_messages import AverageReport as AverageReport
from protocol.averaging_messages import ReducePart as ReducePart
from protocol.averaging_messages import ReduceResult as ReduceResult
from protocol.keys import PeerId
from protocol.message_base import Count as Count
from protocol.message_base import Digest as Digest
from protocol.message_base import Lane as Lane
from protocol.message_base import Message as Message
from protocol.message_base import Path as Path
from protocol.message_base import Peer as Peer
from protocol.message_base import Signature as Signature
from protocol.message_base import Stage as Stage
from protocol.message_base import WorkId as WorkId

PROTOCOL_VERSION = 1


# --- membership and the step ---------------------------------------------------------------


class Presence(Message):
    """Node -> authorities, about once a second: who I am, what I hold. Soft state, idempotent.

    ``step`` and ``digest`` name the state that the node holds; ``stage`` -1 asks for a stage;
    ``seen`` is the order (step, term) of the last decision that the node obeys, (0, 0) for none.
    ``is_restarted``: it is a member there and lost what it did in an earlier life.
    """

    kind: Literal["presence"] = "presence"
    stage: Annotated[int, Field(ge=-1, lt=4096)]
    capacity: Count
    digest: Digest | None
    seen: tuple[Count, Count] = (0, 0)
    wants_hold: bool = False
    is_draining: bool = False
    is_restarted: bool = False


class Assign(Message):
    """Authority -> node without a stage: serve this one."""

    kind: Literal["assign"] = "assign"
    stage: Stage


class Dismiss(Message):
    """Authority -> node that drains: the step in flight cannot end, do not wait for it."""

    kind: Literal["dismiss"] = "dismiss"


class Share(BaseModel):
    """The slots of a step that one data node draws."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    data_node: Peer
    slots: Annotated[tuple[Count, ...], Field(max_length=2**20)]


class Decision(BaseModel):
    """The content of STEP_OPEN: who belongs to a step, who draws what, which states it starts from.

    Ordered by (step, term); terms start at 1 and rise with every decision.
    ``roster[k]`` lists the holders of stage k (0: data nodes), sorted;
    ``digests[k]`` is the state of stage k at the start of ``step``, so opening step s+1 is also
    the word that applies step s. ``is_final`` ends the training: nothing is drawn any more.
    ``begun`` is the term under which the whole step began anew, 0 if it did not: what was done
    before is void, because a data node that nobody can replace lost its part of it.
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
        """What a later decision must exceed."""
        return self.step, self.term

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


# --- the flow of microbatches --------------------------------------------------------------

Purpose = Literal["train", "eval", "redrive"]


# Attempts at a slot, each time the step begins: so what is under way from before is told apart.
ATTEMPTS = 2**20


class FlowMessage(Message):
    """What every message about one microbatch carries."""

    data_node: Peer
    slot: Count
    attempt: Count

    @property
    def begun(self) -> int:
        """``begun`` of the decisions that this try belongs to."""
        return self.attempt // ATTEMPTS

    @property
    def is_first_try(self) -> bool:
        """Whether it does not replace another try."""
        return self.attempt % ATTEMPTS == 0

    @property
    def work(self) -> WorkId:
        """The try at a microbatch that this message is about."""
        return WorkId(self.step, self.data_node, self.slot, self.attempt)


class Forward(FlowMessage):
    """Activation for ``stage``; ``path`` lists the holders of stages 1.. that it has passed.

    Tensor: h [batch, context, width]. ``target`` pins a redrive to the holder of the stage that
    lost this microbatch's gradient: only that holder accumulates.
    """

    kind: Literal["forward"] = "forward"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    path: Path
    purpose: Purpose = "train"
    target_stage: Stage = 0
    target: Peer | None = None


class Backward(FlowMessage):
    """Gradient of the loss by the output of ``stage``; tensor: g [batch, context, width]."""

    kind: Literal["backward"] = "backward"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    path: Path


class Commit(FlowMessage):
    """Data node -> holders of the path: this microbatch's gradient counts."""

    kind: Literal["commit"] = "commit"
    path: Path


class Release(FlowMessage):
    """Data node -> holders: forget this try; another one replaces it."""

    kind: Literal["release"] = "release"


class Failed(FlowMessage):
    """Holder -> data node: this try cannot go on (a hop is gone, full, or refused it)."""

    kind: Literal["failed"] = "failed"
    stage: Stage
    reason: Annotated[str, Field(max_length=200)]


class Busy(FlowMessage):
    """Holder -> previous hop: no room now; choose another holder or wait."""

    kind: Literal["busy"] = "busy"
    stage: Stage


class Entry(BaseModel):
    """One committed microbatch in a STEP_CLOSE."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    slot: Count
    attempt: Count
    path: Path
    loss: float


class StepClose(Message):
    """Data node -> all members: exactly what counts in this step. Signed; members pass it on.

    ``begun`` is that of the decisions it belongs to.
    """

    kind: Literal["step_close"] = "step_close"
    begun: Count = 0
    data_node: Peer
    entries: Annotated[tuple[Entry, ...], Field(max_length=2**16)]
    signature: Signature


# --- reconciling and averaging inside a stage ----------------------------------------------


class LedgerEntry(BaseModel):
    """One (data node, slot, attempt) whose weight gradient a holder has in its sums."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    data_node: Peer
    slot: Count
    attempt: Count


class Ledger(Message):
    """Holder -> holders of its stage: what my sums contain, under this term."""

    kind: Literal["ledger"] = "ledger"
    term: Count
    stage: Stage
    entries: Annotated[tuple[LedgerEntry, ...], Field(max_length=2**16)]


class FetchBoundary(FlowMessage):
    """Holder -> its neighbour on a path: the tensor you keep for this microbatch, please."""

    kind: Literal["fetch_boundary"] = "fetch_boundary"
    direction: Literal["activation", "gradient"]
    stage: Stage


class Boundary(FlowMessage):
    """Answer to FetchBoundary; no tensor when it is no longer kept."""

    kind: Literal["boundary"] = "boundary"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    direction: Literal["activation", "gradient"]
    stage: Stage


class Redrive(FlowMessage):
    """Holder -> data node: both neighbours are gone; drive this microbatch to me once more."""

    kind: Literal["redrive"] = "redrive"
    stage: Stage


# --- state transfer ------------------------------------------------------------------------


class FetchState(Message):
    """Joiner -> holder of its stage: send chunk ``chunk`` of your state at ``step``."""

    kind: Literal["fetch_state"] = "fetch_state"
    stage: Stage
    chunk: Count


class StateChunk(Message):
    """Answer to FetchState. Tensor: [chunk length] uint8, none when the state is not held.

    ``digest`` is that of the whole state, which ``num_chunks`` chunks make.
    """

    kind: Literal["state_chunk"] = "state_chunk"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    chunk: Count
    num_chunks: Count
    digest: Digest | None


ALL_MESSAGES: tuple[type[Message], ...] = (
    Presence, Assign, StepOpen, Prepare, Promise, Accept, Accepted, Prepared, Applied, Suspect,
    Forward, Backward, Commit, Release, Failed, Busy, StepClose, Ledger, FetchBoundary, Boundary,
    Redrive, ReducePart, ReduceResult, FetchState, StateChunk, Dismiss,
    AverageReport,
)  # fmt: skip
MESSAGE_TYPES: dict[str, type[Message]] = {m.model_fields["kind"].default: m for m in ALL_MESSAGES}
