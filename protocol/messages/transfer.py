"""The messages of state transfer."""

from __future__ import annotations

from typing import ClassVar, Literal

from protocol.messages.base import (
    Count,
    Digest,
    Lane,
    Message,
    Stage,
)


class FetchState(Message):
    """Joiner -> holder of its stage: send chunk ``chunk`` of your state at ``step``."""

    kind: Literal["fetch_state"] = "fetch_state"
    stage: Stage
    chunk: Count


class StateChunk(Message):
    """Answer to FetchState. Tensor: [chunk length] uint8, none when the state is not held.

    ``digest`` is that of the whole state, which ``num_chunks`` chunks make. ``is_busy``: it is
    sent to others first; ask another holder, or this one a moment later.
    """

    kind: Literal["state_chunk"] = "state_chunk"
    lane: ClassVar[Lane] = "bulk"
    max_tensors: ClassVar[int] = 1
    stage: Stage
    chunk: Count
    num_chunks: Count
    digest: Digest | None
    is_busy: bool = False
