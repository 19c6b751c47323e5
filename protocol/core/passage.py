"""One try at one microbatch, as one of its hops sees it: where it went and whence it came.

Forward it may have been offered to several holders of the next stage, and come from several of the
stage before: each replacement of a lost hop, and each false suspicion, makes another *branch*. The
branches compute the same; which of them counts is told by the way that the gradient took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from protocol.core.signal import Signal
from protocol.keys import PeerId
from protocol.messages import Commit, Decision, FlowMessage, Purpose, WorkId
from protocol.ports import Tensor

OFFER_PAUSE_S = 0.05
Path = tuple[PeerId, ...]
Route = tuple[PeerId | None, ...]
M = TypeVar("M", bound=FlowMessage)


@dataclass(slots=True)
class Passage:
    """What holders and data nodes know alike of a try.

    ``output`` goes ahead to one of the next stage, ``gradient`` back to the ``source``. ``route``
    names the holders of the stages ahead that are known, the next stage first.
    """

    id: WorkId
    purpose: Purpose
    target_stage: int = 0
    target: PeerId | None = None
    is_repair: bool = False
    route: Route = ()
    # ahead
    output: Tensor | None = None
    next: PeerId | None = None
    pause_s: float = OFFER_PAUSE_S
    is_offering: bool = False
    offered_at: dict[PeerId, float] = field(default_factory=dict)
    counted: set[PeerId] = field(default_factory=set)
    taken: set[PeerId] = field(default_factory=set)
    busy: set[PeerId] = field(default_factory=set)
    lost: set[PeerId] = field(default_factory=set)
    replaced: set[PeerId] = field(default_factory=set)
    avoid: set[PeerId] = field(default_factory=set)
    # back
    is_back: bool = False
    gradient: Tensor | None = None
    trail: Path = ()
    source: PeerId | None = None
    sources: dict[PeerId, Path] = field(default_factory=dict)
    returned_to: set[PeerId] = field(default_factory=set)
    refused_by: set[PeerId] = field(default_factory=set)
    # the end
    commit: Commit | None = None
    is_ended: bool = False
    news: Signal = field(default_factory=Signal)

    @property
    def contacts(self) -> set[PeerId]:
        """Everybody with whom this try was exchanged."""
        return {*self.offered_at, *self.sources}

    def end(self) -> None:
        """Nothing is to be done for it any more."""
        self.is_ended = True
        self.news.notify()


def branch_losers(passage: Passage, path: Path) -> tuple[PeerId, ...]:
    """Holders that worked at a try and are not on the path that counts."""
    return tuple(sorted(passage.contacts - {*path, passage.id.data_node}))


def is_whole(path: Path, decision: Decision, sender: PeerId, end: int) -> bool:
    """Whether a path has a holder of every stage, and its sender at one end (0 or -1)."""
    stages = decision.roster[1:]
    return (
        len(path) == len(stages)
        and path[end] == sender
        and all(peer in holders for peer, holders in zip(path, stages, strict=True))
    )


def about(kind: type[M], work: WorkId, **fields: Any) -> M:
    """Return a message about a try."""
    return kind(**work._asdict(), **fields)
