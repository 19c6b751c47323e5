"""What every part of a node core shares."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import trio

from protocol.averaging import Averager, OrderedAverager
from protocol.core.journal import Journal
from protocol.core.reply_times import ReplyTimes
from protocol.core.signal import Signal
from protocol.deadlines import Deadlines
from protocol.errors import PeerError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest
from protocol.messages import Boundary, Decision, FetchBoundary, Message, WorkId
from protocol.ports import (
    BlockStage,
    EdgeStage,
    FaultPoints,
    GroupKey,
    InitialWeights,
    JobKind,
    Network,
    Observer,
    Registry,
    Runner,
    Snapshots,
    StageState,
    Tensor,
)
from protocol.routing import Router

T = TypeVar("T")


async def _keep_nothing(decision: Decision) -> None:
    pass


@dataclass(frozen=True, slots=True)
class NodePorts:
    """Through which a node core reaches the world; ``averager`` None is the exact one."""

    network: Network
    registry: Registry
    runner: Runner
    make_stage: Callable[[int], StageState]
    journal: Journal
    observer: Observer
    faults: FaultPoints
    rng: random.Random
    snapshots: Snapshots
    averager: Averager | None = None
    initial: InitialWeights | None = None


@dataclass(slots=True)
class Context:
    """The ports and constants of one node, and the stage it serves."""

    key: NodeKey
    manifest: Manifest
    swarm: str
    network: Network
    runner: Runner
    router: Router
    averager: Averager
    deadlines: Deadlines
    observer: Observer
    faults: FaultPoints
    journal: Journal
    rng: random.Random
    stage: int
    state: StageState
    capacity: int
    loopback: Callable[[Message], None]
    keep_prepared: Callable[[Decision], Awaitable[None]] = _keep_nothing
    window_changed: Signal = field(default_factory=Signal)
    origin: str = "the seed, at step 0"  # of the stage's state, for its owner
    times: ReplyTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = ReplyTimes(self.deadlines)

    @property
    def me(self) -> PeerId:
        """This node's PeerID."""
        return self.key.peer_id

    @property
    def num_stages(self) -> int:
        """S, the number of transformer stages."""
        return self.manifest.pipeline.num_stages

    @property
    def blocks(self) -> BlockStage:
        """The stage's computation, for a holder of stages 1..S."""
        return cast(BlockStage, self.state)

    @property
    def edge(self) -> EdgeStage:
        """The stage's computation, for a data node."""
        return cast(EdgeStage, self.state)

    @property
    def sums_by_slot(self) -> bool:
        """Whether each slot's gradient is kept apart until all are added in slot order."""
        return self.manifest.training.sums == "slots"

    @property
    def ordered_averager(self) -> OrderedAverager:
        """The averager of a swarm that sums by slot."""
        return cast(OrderedAverager, self.averager)

    def group_of(self, work: WorkId) -> GroupKey:
        """The sum that a microbatch's gradient joins: its data node's, or one of its own."""
        return (work.data_node, work.slot) if self.sums_by_slot else work.data_node

    async def compute(self, kind: JobKind, job: Callable[[], T]) -> T:
        """Run a job on this node's stage, off the event loop."""
        return await self.runner.run(kind, job)

    async def try_send(
        self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()
    ) -> bool:
        """Send to a peer; a peer's fault is counted and answered with False."""
        try:
            await self.network.send(peer, message, tensors)
        except PeerError as error:
            self.observer.count("errors", code=error.code)
            return False
        return True

    async def answer_boundary(
        self, message: FetchBoundary, sender: PeerId, tensor: Tensor | None
    ) -> None:
        """Answer a neighbour that repairs: with the tensor, or with none if it is not kept."""
        reply = Boundary(
            step=message.step, data_node=message.data_node, slot=message.slot,
            attempt=message.attempt, direction=message.direction, stage=message.stage,
        )  # fmt: skip
        await self.try_send(sender, reply, () if tensor is None else (tensor,))

    async def send_all(self, peers: Iterable[PeerId], message: Message) -> None:
        """Send a control message to several peers at once; faults are counted only."""
        async with trio.open_nursery() as nursery:
            for peer in peers:
                if peer != self.me:
                    nursery.start_soon(self.try_send, peer, message)

    async def tell_authorities(self, message: Message) -> None:
        """Send a message to every authority, this node among them if it is one."""
        if self.me in self.manifest.authorities:
            self.loopback(message)
        await self.send_all(self.manifest.authorities, message)


def with_digest(state: StageState) -> StageState:
    """Digest a new state while still in the worker: that of a large one takes long."""
    _ = state.digest
    return state
