"""Every message between nodes: frozen models that refuse unknown fields.

A message is a small header; tensors travel beside it as raw bytes (``wire`` turns both into a
frame). Each type names its lane (control and bulk never share a connection) and how many tensors
it carries. ``step`` and ``epoch`` (of the transforms) are on every message: a mismatch is refused.
"""

from __future__ import annotations

from protocol.messages.averaging import (
    AVERAGING_MESSAGES,
    AverageReport,
    ReducePart,
    ReduceResult,
)
from protocol.messages.base import (
    PROTOCOL_VERSION,
    Count,
    Digest,
    Lane,
    Message,
    Path,
    Peer,
    Signature,
    Stage,
    WorkId,
)
from protocol.messages.flow import (
    ATTEMPTS,
    Backward,
    Busy,
    Commit,
    Computed,
    Entry,
    Failed,
    FlowMessage,
    Forward,
    HopLost,
    Purpose,
    Release,
    Resume,
    StepClose,
)
from protocol.messages.membership import (
    Accept,
    Accepted,
    Applied,
    Assign,
    Decision,
    Paused,
    Prepare,
    Prepared,
    Presence,
    Promise,
    Share,
    StepOpen,
    Suspect,
    Vote,
)
from protocol.messages.repair import (
    Boundary,
    FetchBoundary,
    Ledger,
    LedgerEntry,
    Redrive,
)
from protocol.messages.routing import ROUTING_MESSAGES, RoutingMessage
from protocol.messages.sessions import (
    SESSION_MESSAGES,
    Extend,
    FetchInitial,
    FetchPinned,
    Pin,
    Pinned,
    SessionMessage,
    SessionPurpose,
    Stuck,
    Unpin,
)
from protocol.messages.transfer import (
    FetchState,
    StateChunk,
)

__all__ = [
    "ALL_MESSAGES",
    "ATTEMPTS",
    "AVERAGING_MESSAGES",
    "MESSAGE_TYPES",
    "PROTOCOL_VERSION",
    "ROUTING_MESSAGES",
    "SESSION_MESSAGES",
    "Accept",
    "Accepted",
    "Applied",
    "Assign",
    "AverageReport",
    "Backward",
    "Boundary",
    "Busy",
    "Commit",
    "Computed",
    "Count",
    "Decision",
    "Digest",
    "Entry",
    "Extend",
    "Failed",
    "FetchBoundary",
    "FetchInitial",
    "FetchPinned",
    "FetchState",
    "FlowMessage",
    "Forward",
    "HopLost",
    "Lane",
    "Ledger",
    "LedgerEntry",
    "Message",
    "Path",
    "Paused",
    "Peer",
    "Pin",
    "Pinned",
    "Prepare",
    "Prepared",
    "Presence",
    "Promise",
    "Purpose",
    "Redrive",
    "ReducePart",
    "ReduceResult",
    "Release",
    "Resume",
    "RoutingMessage",
    "SessionMessage",
    "SessionPurpose",
    "Share",
    "Signature",
    "Stage",
    "StateChunk",
    "StepClose",
    "StepOpen",
    "Stuck",
    "Suspect",
    "Unpin",
    "Vote",
    "WorkId",
]

ALL_MESSAGES: tuple[type[Message], ...] = (
    Presence, Assign, StepOpen, Prepare, Promise, Accept, Accepted, Prepared, Applied, Suspect,
    Forward, Backward, Commit, Release, Failed, Busy, StepClose, Ledger, FetchBoundary, Boundary,
    Redrive, ReducePart, ReduceResult, FetchState, StateChunk, Paused,
    AverageReport, Computed, HopLost, Resume,
    *ROUTING_MESSAGES, *SESSION_MESSAGES, FetchInitial,
)  # fmt: skip
MESSAGE_TYPES: dict[str, type[Message]] = {m.model_fields["kind"].default: m for m in ALL_MESSAGES}
