"""The messages of a microbatch on its way through the stages, and of a data node's close."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.messages.base import (
    Count,
    Lane,
    Message,
    Path,
    Peer,
    Signature,
    Stage,
    WorkId,
)

Purpose = Literal["train", "eval", "redrive"]
# Holders of the stages that follow, as far as they are known.
Route = Annotated[tuple[Peer | None, ...], Field(max_length=4096)]


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
    lost this microbatch's gradient: only that holder accumulates. ``is_repair`` says that this
    branch replaces one that was lost on the way; ``route`` then names the holders of the stages
    behind ``stage`` that have the microbatch already.
    """

    kind: Literal["forward"] = "forward"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    path: Path
    purpose: Purpose = "train"
    target_stage: Stage = 0
    target: Peer | None = None
    is_repair: bool = False
    route: Route = ()


class Backward(FlowMessage):
    """Gradient of the loss by the output of ``stage``; tensor: g [batch, context, width].

    ``path`` lists the holders of the stages behind ``stage`` that it has come through.
    """

    kind: Literal["backward"] = "backward"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    path: Path


class Commit(FlowMessage):
    """Data node -> holders: this microbatch's gradient counts, in the holders of ``path``.

    Passed on to those who worked at it in vain, who then forget it.
    """

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


class Computed(FlowMessage):
    """To whoever sent the tensor: ``stage`` has computed it, the sign of life waited for.

    Stage 0, to holders that are not on its path: the activation is home, other branches are in
    vain.
    """

    kind: Literal["computed"] = "computed"
    stage: Stage
    is_backward: bool = False


class HopLost(FlowMessage):
    """Holder -> data node: ``peer`` of ``stage``, next to me on the path, is gone or silent.

    ``before`` is the holder, or the data node, from which it had the activation.
    """

    kind: Literal["hop_lost"] = "hop_lost"
    stage: Stage
    peer: Peer
    before: Peer


class Resume(FlowMessage):
    """Data node -> holder before a lost hop: send what you keep to another holder of ``stage``.

    ``route`` names the holders behind it that have the microbatch already.
    """

    kind: Literal["resume"] = "resume"
    stage: Stage
    peer: Peer
    route: Route


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
