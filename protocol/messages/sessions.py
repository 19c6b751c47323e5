"""The messages of sessions: a holder keeps one step's weights for a while, for who asks for them.

A session belongs to the node that asked and is numbered by it. It outlives the step that it is
pinned to; ``step`` is that one, on every message.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from protocol.messages.base import Count, Digest, Lane, Message, Path, Peer, Stage

SessionPurpose = Literal["generate", "export"]


class SessionMessage(Message):
    """What every message of a session carries: who asked for it, and its number there."""

    owner: Peer
    session: Count


class Pin(SessionMessage):
    """Owner -> holder: keep your stage's state at ``step``; said again, it is kept for longer.

    ``generate`` needs the weights and room for ``num_positions`` tokens, ``export`` all of it.
    """

    kind: Literal["pin"] = "pin"
    stage: Stage
    purpose: SessionPurpose
    num_positions: Count = 0


class Pinned(SessionMessage):
    """Holder -> owner: it is kept, under this digest, or it is not, because of ``refusal``."""

    kind: Literal["pinned"] = "pinned"
    stage: Stage
    digest: Digest | None = None
    refusal: Annotated[str, Field(max_length=200)] = ""


class Unpin(SessionMessage):
    """Owner -> holder: forget the session."""

    kind: Literal["unpin"] = "unpin"


class Extend(SessionMessage):
    """Activations of the next tokens for ``stage``, the first at ``position``.

    Tensor: h [1, tokens, width]; behind the last stage, for the owner, [1, 1, width]. ``route``
    names the holders of the stages behind it. A higher ``attempt`` begins anew at position 0.
    """

    kind: Literal["extend"] = "extend"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Annotated[int, Field(ge=1, le=4096)]
    attempt: Count
    position: Count
    route: Path


class Stuck(SessionMessage):
    """Holder -> owner: ``attempt`` cannot go on, for ``peer`` of ``stage`` does not do its part."""

    kind: Literal["stuck"] = "stuck"
    stage: Stage
    attempt: Count
    peer: Peer
    reason: Annotated[str, Field(max_length=200)]


class FetchPinned(SessionMessage):
    """Owner -> holder: send chunk ``chunk`` of the pinned state; the answer is a StateChunk."""

    kind: Literal["fetch_pinned"] = "fetch_pinned"
    stage: Stage
    chunk: Count


class FetchInitial(Message):
    """Joiner -> authority: send chunk ``chunk`` of the weights with which ``stage`` begins.

    The answer is a StateChunk whose digest is the manifest's.
    """

    kind: Literal["fetch_initial"] = "fetch_initial"
    stage: Stage
    chunk: Count


SESSION_MESSAGES: tuple[type[SessionMessage], ...] = (
    Pin, Pinned, Unpin, Extend, Stuck, FetchPinned,
)  # fmt: skip
