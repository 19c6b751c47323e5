"""What the parts of a flow node share: who it is, its edges, its view, what it will send."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.messages.routing import MOST_S
from protocol.routing.settings import RoutingSettings
from protocol.routing.tables import FlowTable
from protocol.routing.view import View


@dataclass(frozen=True, slots=True)
class Send:
    """The one kind of action: send ``message`` to ``peer``."""

    peer: PeerId
    message: Message


class Costs(Protocol):
    """What is measured."""

    def compute_s(self) -> float:
        """Mean of forward and backward of one microbatch here."""
        ...

    def link_s(self, peer: PeerId) -> float:
        """Latency and transfer of one microbatch, mean of both directions (spec 1.1)."""
        ...


@dataclass(slots=True)
class Pending:
    """A unit that was asked for."""

    peer: PeerId
    target: PeerId
    link_s: float
    sent: int


@dataclass(slots=True)
class Context:
    """The state of one node that its parts share; ``tick`` counts this node's own ticks."""

    me: PeerId
    stage: int
    num_stages: int
    capacity: int
    demand: int
    costs: Costs
    rng: random.Random
    settings: RoutingSettings
    table: FlowTable
    view: View
    now: float = 0.0
    tick: int = 0
    next_id: int = 0
    pending: dict[int, Pending] = field(default_factory=dict)
    reserved: int = 0  # units of capacity promised to tokens
    num_held: int = 0  # tokens whose end is awaited
    outbox: list[Send] = field(default_factory=list)
    last_change: tuple[float, str] | None = None
    is_draining: bool = False

    @property
    def is_data_node(self) -> bool:
        """Stage 0: source and sink of its own flows."""
        return self.stage == 0

    def is_sink(self, peer: PeerId) -> bool:
        """Whether flows through here may end at ``peer``: nobody else's targets are remembered."""
        return peer == self.me if self.is_data_node else self.view.known.get(peer) == 0

    def send(self, peer: PeerId, message: Message) -> None:
        """Send ``message`` with this round's actions."""
        self.outbox.append(Send(peer, message))

    def flush(self) -> list[Send]:
        """Hand over what is to be sent."""
        sends, self.outbox = self.outbox, []
        return sends

    def new_id(self) -> int:
        """A number for an edge that starts here."""
        self.next_id += 1
        return self.next_id

    def changed(self, why: str) -> None:
        """Remember the last re-routing and its reason."""
        self.last_change = (self.now, why)

    def room(self) -> int:
        """Units that could still be taken, those asked for and promised counted as taken."""
        pending = Counter(p.target for p in self.pending.values())
        return self.capacity - self.table.need_of(pending) - self.reserved

    def firm(self, *, is_growing: bool) -> int:
        """Units that do not make way for another flow.

        A route that has not reached its source yields to a flow that would; to a mere exchange it
        yields only once it is old, or routes would never grow.
        """
        young = self.tick - self.settings.stub_ticks
        stubs = 0
        if not is_growing:
            stubs = sum(not e.is_live and e.idle_since > young for e in self.table.outs.values())
        return self.table.num_live() + self.reserved + stubs

    def link_s(self, peer: PeerId) -> float:
        """d_ij (spec 1.1): half of both ends' compute time, and the link."""
        other = self.view.compute_of.get(peer, 0.0)
        return min(MOST_S, 0.5 * (self.costs.compute_s() + other) + self.costs.link_s(peer))
