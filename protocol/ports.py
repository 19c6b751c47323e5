"""The interfaces through which the node core reaches the world; each has two adapters.

| port             | in the daemon                                | in the simulator             |
|------------------|----------------------------------------------|------------------------------|
| Network          | node/transport (py-libp2p)                   | simulation/network           |
| Registry         | node/sidecar (hivemind's DHT)                | simulation/registry          |
| Averager         | averaging/exact, or agreed over node/sidecar | averaging/exact              |
| Runner           | node/compute (one worker thread)             | simulation/runner (cost)     |
| Snapshots        | node/snapshots (files)                       | simulation/disk              |
| InitialWeights   | node/initial (files)                         | none                         |
| Stage computation| stages/ (torch)                              | simulation/, or torch |

The clock is trio's and the simulator swaps it for a MockClock; randomness is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
import trio

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.records import NodeRecord

T = TypeVar("T")
Tensor = torch.Tensor
WorkKey = Hashable
GroupKey = Hashable
# Step, digest and canonical bytes in pieces. The pieces are the stage's own buffers, which change
# some steps later: whoever takes long over them checks the digest at the end.
StateView = tuple[int, str, tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message that arrived, its sender (proved by the session) and its tensors."""

    sender: PeerId
    message: Message
    tensors: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerChange:
    """A session with a peer came up or went down."""

    peer: PeerId
    is_up: bool
    reason: str = ""


class Network(Protocol):
    """Sessions with other nodes. Delivery is at most once, in order per lane, acknowledged."""

    peer_id: PeerId
    events: trio.MemoryReceiveChannel[Envelope | PeerChange]

    async def send(self, peer: PeerId, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Deliver a message: dial if there is no session, return when the peer acknowledged it.

        Raises PeerGone (no address, dial failed, session ended) or PeerTimeout (``delivery_s``).
        The tensors must not be changed until it returns.
        """
        ...

    def introduce(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Learn where a peer listens (from its signed record)."""
        ...

    def expect(self, peers: Collection[PeerId]) -> None:
        """The peers that the swarm counts on: no stranger may take their place."""
        ...

    def connected(self) -> Collection[PeerId]:
        """The peers whose session is up now."""
        ...

    def rtt_s(self, peer: PeerId) -> float | None:
        """The smoothed round trip of heartbeats, or None if unknown."""
        ...

    def bandwidths(self, peer: PeerId) -> tuple[float | None, float | None]:
        """Bytes per second that transfers to and from a peer reached, as far as that is known."""
        ...

    def drop(self, peer: PeerId, reason: str) -> None:
        """End the session with a peer that misbehaved or fell silent."""
        ...


class Registry(Protocol):
    """Signed, sequenced, expiring records; used for discovery alone."""

    async def publish(self, record: NodeRecord) -> None:
        """Store this node's record until it expires; raise SidecarError if that fails."""
        ...

    async def nodes(self) -> Sequence[NodeRecord]:
        """The valid records of all nodes of the swarm."""
        ...


JobKind = Literal["embed", "forward", "backward", "edge", "commit", "update", "state"]

# What frees memory or what others wait for comes first; new microbatches can always wait.
JOB_PRIORITY: dict[JobKind, int] = {
    "commit": 0, "update": 0, "state": 0, "backward": 1, "edge": 2, "forward": 3, "embed": 4,
}  # fmt: skip


class Runner(Protocol):
    """Where computation happens: one at a time, backward work before forward work."""

    async def run(self, kind: JobKind, job: Callable[[], T]) -> T:
        """Run ``job`` off the event loop, return its result, count its seconds by phase.

        Cancelling the caller does not interrupt a job that has started.
        """
        ...

    def mean_s(self, kind: JobKind) -> float | None:
        """How long a job of this kind takes of late, without its waiting; None if none ran."""
        ...


class Pin(Protocol):
    """A state that stays as it was when the stage goes on. The Runner's jobs alone call it.

    It lives as long as somebody holds on to it.
    """

    step: int
    digest: str

    @property
    def num_bytes(self) -> int:
        """Memory that it takes once the stage has gone on."""
        ...

    def num_chunks(self, chunk_bytes: int) -> int:
        """Number of chunks of its canonical bytes, whatever the length of the first one."""
        ...

    def chunk(self, number: int, chunk_bytes: int) -> Tensor:
        """Return a copy of one chunk [bytes] of a whole state's canonical bytes."""
        ...


class Cache(Protocol):
    """What a stage keeps of the tokens of one sequence, to go on from there."""

    num_tokens: int


class StageState(Protocol):
    """What all stages can do with their parameters. Synchronous; called through a Runner only.

    Weight gradients are kept apart per work key until committed, then in one sum per group (the
    data node whose microbatch it was). ``prepare`` writes new weights and optimiser state into
    new buffers; ``apply`` swaps them in and keeps the old ones until the next ``prepare``.
    """

    @property
    def step(self) -> int:
        """The number of optimiser steps in this state."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical bytes of the state at ``step``."""
        ...

    @property
    def num_gradients(self) -> int:
        """Number of elements of the flat gradient."""
        ...

    def commit(self, key: WorkKey, group: GroupKey) -> None:
        """Add the weight gradient kept under ``key`` to the sum of ``group``; KeyError if none."""
        ...

    def discard(self, key: WorkKey) -> None:
        """Forget whatever is kept under ``key``; nothing happens if there is nothing."""
        ...

    def gradient(self, groups: Sequence[GroupKey]) -> Tensor:
        """Return the flat fp32 sum over ``groups`` in the order given; zeros where none is."""
        ...

    def gradients(self, groups: Sequence[GroupKey]) -> list[Tensor]:
        """Return each group's flat fp32 sum, not to be changed; KeyError where none is."""
        ...

    def prepare(self, gradient_sum: Tensor, num_microbatches: int) -> str:
        """Divide by the count, clip, step the optimiser into new buffers; return their digest."""
        ...

    def apply(self) -> None:
        """Make the prepared buffers the state (step + 1); drop all gradients."""
        ...

    def abandon(self) -> None:
        """Drop the prepared buffers, if any; gradients stay."""
        ...

    def reset(self) -> None:
        """Drop all gradients, kept graphs and prepared buffers."""
        ...

    def export_state(self) -> Tensor:
        """Return the canonical bytes of the state at ``step`` as a uint8 tensor."""
        ...

    def view_state(self, *, is_prepared: bool = False) -> StateView | None:
        """The same as ``StateView``, of the state or of the prepared one (None without one)."""
        ...

    def import_state(self, data: Tensor, digest: str) -> None:
        """Replace the state; raise StateMismatch if the bytes do not have this digest."""
        ...

    def begin_with(self, data: Tensor, digest: str) -> None:
        """Be at step 0 with these weights; raise StateMismatch if they do not have this digest."""
        ...

    def pin(self, step: int, *, is_whole: bool) -> Pin | None:
        """Keep the state at ``step``, or its weights alone; None if it is not there any more."""
        ...

    def weights_of(self, stage: int, digest: str, data: Tensor) -> tuple[Tensor, float | None]:
        """Return the flat weights in another stage's canonical bytes, and its gradient norm.

        The norm is that of the step that made the state, before clipping; None if it is unknown.
        Raises StateMismatch if the bytes do not have this digest or do not fit this stage.
        """
        ...

    def rebuild_from(
        self, below: Tensor, above: Tensor, weight_above: float, *, step: int, lr_scale: float
    ) -> None:
        """Make the weighted mean of two other stages' weights the state at ``step``.

        The optimiser is fresh and the learning rate scaled; the same bits on every computer.
        """
        ...


class BlockStage(StageState, Protocol):
    """Stages 1..S: a run of transformer blocks."""

    def forward(self, key: WorkKey, h_BTW: Tensor, *, keep: bool) -> Tensor:
        """Return the stage's output; keep what backward needs under ``key`` if asked."""
        ...

    def backward(self, key: WorkKey, g_BTW: Tensor) -> Tensor:
        """Return the gradient by the input; keep the weight gradient apart under ``key``."""
        ...

    def cache_bytes(self, num_positions: int) -> int:
        """Return the memory of a cache for one sequence of so many tokens."""
        ...

    def open_cache(self, pin: Any, num_positions: int) -> Cache:
        """Begin a sequence under pinned weights."""
        ...

    def extend(self, cache: Any, h_BTW: Tensor) -> Tensor:
        """Return the output [1, T, W] for the tokens that follow those in the cache."""
        ...


class EdgeStage(StageState, Protocol):
    """Stage 0, the data node: draws text, embeds it, and computes head and loss."""

    def embed(self, key: WorkKey, step: int, slot: int) -> Tensor:
        """Draw the microbatch of (seed, step, slot), embed it, keep its targets under ``key``."""
        ...

    def embed_validation(self, key: WorkKey, index: int) -> Tensor:
        """The same for the ``index``-th held-out microbatch."""
        ...

    def loss(self, key: WorkKey, h_BTW: Tensor) -> float:
        """The mean loss of the microbatch, without gradients; drops the key."""
        ...

    def loss_and_gradient(self, key: WorkKey, h_BTW: Tensor) -> tuple[float, Tensor]:
        """The mean loss and its gradient by ``h_BTW``; keeps the head's weight gradient."""
        ...

    def embed_tokens(self, pin: Any, tokens_BT: Tensor) -> Tensor:
        """Embed given tokens with pinned weights, for generation; keeps nothing."""
        ...

    def logits(self, pin: Any, h_BTW: Tensor) -> Tensor:
        """The logits [batch, vocabulary] of the last position, for generation."""
        ...

    def embed_backward(self, key: WorkKey, g_BTW: Tensor) -> None:
        """Add the embedding's gradient to what is kept under ``key``."""
        ...


class Snapshots(Protocol):
    """The states of this node's stage on its owner's disk, each under its digest.

    A state is *decided* once the swarm has opened a step from it; one that was only prepared is
    given out by its digest alone.
    """

    def holds(self, digest: str) -> bool:
        """Whether a usable snapshot has this digest."""
        ...

    def is_decided(self, digest: str) -> bool:
        """Whether it is there and known to be decided."""
        ...

    def decided(self, stage: int) -> Sequence[tuple[int, str]]:
        """Step and digest of the decided states of a stage; what was written last comes first."""
        ...

    async def load(self, digest: str) -> Tensor | None:
        """Return the canonical bytes as a uint8 tensor, unchecked; None if they are not there.

        Raises ResourceError if they cannot be read.
        """
        ...

    async def save(self, stage: int, view: StateView, *, is_decided: bool) -> None:
        """Write a state whole or not at all, then drop what is too old.

        Raises ResourceError if there is no room, StateMismatch if the bytes are not (or no longer)
        those of the digest; what was there before stays.
        """
        ...

    async def decide(self, digest: str) -> None:
        """Note that a state which is there is decided."""
        ...

    async def set_aside(self, digest: str) -> None:
        """Never give this one out again."""
        ...


class InitialWeights(Protocol):
    """The weights that the manifest names for step 0, on the disk of who imported them."""

    async def chunk(self, stage: int, number: int) -> tuple[int, Tensor] | None:
        """Return the number of chunks of a stage's file and one of them [bytes], if it is there."""
        ...


class Observer(Protocol):
    """Where things happen, they are counted: metrics, status and logs in the daemon."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter of docs/metrics.md."""
        ...

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge of docs/metrics.md."""
        ...

    def event(self, name: str, **fields: object) -> None:
        """Something happened that a person may want to read (past tense, no secrets)."""
        ...


class FaultPoints(Protocol):
    """Named points of the step where a test may kill, freeze or slow the node."""

    async def reach(self, point: str, step: int) -> None:
        """Called when the node passes the point; returns at once outside of tests."""
        ...
