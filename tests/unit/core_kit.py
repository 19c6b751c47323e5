"""A node core's parts on small fakes: the toy stage, a virtual worker, a network that records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import torch
import trio
from step_kit import KEYS, PEERS, SWARM, digest_of, manifest_of

from protocol.averaging import ExactAverager
from protocol.core.context import Context
from protocol.core.journal import MemoryJournal
from protocol.core.passage import about
from protocol.deadlines import Deadlines
from protocol.errors import PeerGone
from protocol.keys import NodeKey, PeerId
from protocol.messages import Backward, Computed, Decision, Forward, Message, WorkId
from protocol.ports import Envelope, JobKind, Tensor
from protocol.routing import FlowRouter, MeasuredCosts
from protocol.simulation.host import VirtualHost
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.timeline import Timeline
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.trace import Trace, TracingObserver

M = TypeVar("M", bound=Message)
LIMITS = Deadlines()
COSTS: dict[JobKind, float] = dict.fromkeys(
    ("embed", "forward", "backward", "edge", "commit", "update", "state"), 1.0
)  # type: ignore[arg-type]


class NoPoints:
    """No faults."""

    async def reach(self, point: str, step: int) -> None:
        """Go on."""


@dataclass
class FakeNetwork:
    """Takes all that is sent, but for the peers that are ``gone``.

    With ``hear`` set, whoever gets a tensor says at once that it computed it, but for those that
    are ``silent``.
    """

    peer_id: PeerId
    nursery: trio.Nursery | None = None
    hear: Callable[[Computed, PeerId], Awaitable[None]] | None = None
    silent: set[PeerId] = field(default_factory=set)
    sent: list[tuple[PeerId, Message, tuple[Tensor, ...]]] = field(default_factory=list)
    gone: set[PeerId] = field(default_factory=set)
    dropped: list[PeerId] = field(default_factory=list)

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        await trio.lowlevel.checkpoint()
        assert peer != self.peer_id, "a node does not send to itself"
        if peer in self.gone:
            raise PeerGone("it is gone")
        self.sent.append((peer, message, tuple(tensors)))
        if self.hear and self.nursery and peer not in self.silent:
            self._answer(peer, message)

    def _answer(self, peer: PeerId, message: Message) -> None:
        if isinstance(message, Forward | Backward):
            is_backward = isinstance(message, Backward)
            said = about(Computed, message.work, stage=message.stage, is_backward=is_backward)
            self.nursery.start_soon(self.hear, said, peer)

    def rtt_s(self, peer: PeerId) -> float | None:
        return None

    def bandwidths(self, peer: PeerId) -> tuple[float | None, float | None]:
        return None, None

    def expect(self, peers: object) -> None:
        pass

    def connected(self) -> list[PeerId]:
        return []

    def drop(self, peer: PeerId, reason: str) -> None:
        self.dropped.append(peer)

    def of(self, kind: type[M], to: PeerId | None = None) -> list[M]:
        """The messages of one kind, in order."""
        return [m for p, m, _ in self.sent if isinstance(m, kind) and to in (None, p)]


@dataclass
class Bench:
    """One node's context and the fakes below it."""

    ctx: Context
    network: FakeNetwork
    observer: TracingObserver
    looped: list[Message]

    @property
    def state(self) -> Any:
        return self.ctx.state

    @property
    def is_clean(self) -> bool:
        """Whether the stage keeps nothing of any microbatch."""
        kept = (self.state._kept, *(getattr(self.state, n, ()) for n in ("_inputs", "_drawn")))
        return not any(len(part) for part in kept)


def bench_of(
    nursery: trio.Nursery,
    key: NodeKey,
    stage: int,
    *,
    num_stages: int = 2,
    capacity: int = 4,
    authorities: int = 1,
    costs: dict[JobKind, float] | None = None,
) -> Bench:
    """A node at a toy stage whose jobs each take a second; call with an autojump clock."""
    timeline = Timeline()
    nursery.start_soon(timeline.run)
    host = VirtualHost("n", key.peer_id, timeline, cost_s=COSTS if costs is None else costs)
    network, observer = FakeNetwork(key.peer_id, nursery), TracingObserver("n", Trace())
    manifest, looped = manifest_of(num_stages, authorities=authorities), []
    ctx = Context(
        key=key, manifest=manifest, swarm=SWARM, network=network, runner=VirtualRunner(host),
        router=router_of(network), averager=ExactAverager(network, LIMITS),
        deadlines=LIMITS, observer=observer, faults=NoPoints(), journal=MemoryJournal(),
        rng=Random(0), stage=stage, state=toy_stage(manifest, stage), capacity=capacity,
        loopback=looped.append,
    )  # fmt: skip
    return Bench(ctx, network, observer, looped)


def router_of(network: FakeNetwork) -> FlowRouter:
    """A router without flows: it has no stage."""
    costs = MeasuredCosts(1000, network.rtt_s, network.bandwidths, lambda: (None, None))
    return FlowRouter(network.peer_id, costs=costs, rtt_s=network.rtt_s, rng=Random(0))


def initial_digests(num_stages: int = 2) -> tuple[str, ...]:
    """The digests of the toy stages at step 0."""
    manifest = manifest_of(num_stages)
    return tuple(toy_stage(manifest, stage).digest for stage in range(num_stages + 1))


def activation(slot: int = 0) -> Tensor:
    """A boundary tensor [1, 1, 4] of a slot."""
    return torch.tensor([[[0.1, 0.2, 0.3, float(slot)]]])


def forward(
    work: WorkId, stage: int, path: Sequence[PeerId] = (), sender: PeerId | None = None, **more: Any
) -> Envelope:
    """A Forward as its sender would send it."""
    message = Forward(**work._asdict(), stage=stage, path=tuple(path), **more)
    sender = sender or (path[-1] if path else work.data_node)
    return Envelope(sender, message, (activation(work.slot),))


__all__ = [
    "KEYS", "LIMITS", "PEERS", "Bench", "Decision", "FakeNetwork", "activation", "bench_of",
    "digest_of", "forward", "initial_digests", "router_of",
]  # fmt: skip
