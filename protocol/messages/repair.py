"""The messages by which holders of a stage find out what is missing, and compute it again."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol.messages.base import (
    Count,
    Lane,
    Message,
    Peer,
    Stage,
)
from protocol.messages.flow import FlowMessage


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
