"""State transfer between holders of a stage: chunked, checked, resumable from another donor.

A donor serves the state at the start of its current step out of its own buffers, which no one
changes during the step; training goes on. It serves few joiners at a time, so that each has the
state soon, and tells the others that it is busy. A joiner takes chunks from any holder, because all
replicas are bit-identical, and goes on at the same offset when a donor is gone or busy. Only the
digest that the swarm decided makes the whole acceptable: if it does not fit, and several donors had
a part in it, the next try takes all of it from one, and so finds the liar out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import torch
import trio

from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.core.turns import Pace, Turns
from protocol.errors import PeerError, PeerGone, PeerTimeout, ProtocolViolation, StateMismatch
from protocol.keys import PeerId
from protocol.messages import Decision, FetchState, StateChunk
from protocol.ports import Envelope, StateView, Tensor

CHUNK_BYTES = 2 * 2**20
MAX_CHUNKS = 2**24
# Joiners that are sent the state at the same time; the others wait for their turn.
MOST_AT_ONCE = 4
# How often one peer may be sent the whole state of a step: transfers fail and begin again.
MOST_TIMES = 4
# After which a joiner asks again when all donors are busy.
BUSY_PAUSE_S = 0.5


class Donor:
    """Serves this node's state to joiners, at ``bytes_per_s`` at most."""

    def __init__(self, ctx: Context, bytes_per_s: float | None = None) -> None:
        self._ctx = ctx
        self._view: StateView | None = None
        self._lock = trio.Lock()
        self._served: set[PeerId] = set()
        self._given: Counter[PeerId] = Counter()
        self._pace = Pace(bytes_per_s)
        limits = ctx.deadlines
        num_at_once = self._pace.num_at_once(MOST_AT_ONCE, CHUNK_BYTES, limits.request_s / 2)
        self._turns = Turns(num_at_once, limits.session_silence_s)

    async def serve(self, message: FetchState, sender: PeerId) -> None:
        """Answer with one chunk, or without a tensor: not held, or busy with others.

        Each peer gets one chunk at a time: who asks for more at once gets nothing more. Nor does
        who has been sent the state several times already.
        """
        if sender in self._served:
            return
        self._served.add(sender)
        try:
            await self._answer(message, sender)
        finally:
            self._served.discard(sender)

    async def _answer(self, message: FetchState, sender: PeerId) -> None:
        ctx = self._ctx
        async with self._lock:
            is_new = self._view is None or self._view[0] != message.step
            if is_new and message.step == ctx.state.step:
                self._view = await ctx.compute("state", ctx.state.view_state)
        num_chunks = self._num_chunks(message)
        if message.chunk >= num_chunks or self._given[sender] >= MOST_TIMES * num_chunks:
            self._turns.end(sender)
            return await self._send(message, sender, None)
        if not self._turns.admits(sender, trio.current_time()):
            return await self._send(message, sender, None, is_busy=True)
        await self._pace.wait(CHUNK_BYTES)
        # the step may be over by now, and its buffers about to change
        is_held = self._num_chunks(message) > 0
        await self._send(message, sender, self._chunk(message.chunk) if is_held else None)
        if message.chunk == num_chunks - 1:
            self._turns.end(sender)
        else:
            self._turns.is_at_work(sender, trio.current_time())
        return None

    async def _send(
        self, message: FetchState, sender: PeerId, chunk: Tensor | None, *, is_busy: bool = False
    ) -> None:
        view = self._view if chunk is not None else None
        reply = StateChunk(
            step=message.step, stage=self._ctx.stage, chunk=message.chunk, is_busy=is_busy,
            num_chunks=self._num_chunks(message) if view else 0, digest=view[1] if view else None,
        )  # fmt: skip
        self._given[sender] += chunk is not None
        await self._ctx.try_send(sender, reply, () if chunk is None else (chunk,))

    def _num_chunks(self, message: FetchState) -> int:
        """0 if the state that is asked for is not held."""
        view = self._view
        if view is None or (view[0], self._ctx.stage) != (message.step, message.stage):
            return 0
        return -(-sum(len(piece) for piece in view[2]) // CHUNK_BYTES)

    def _chunk(self, number: int) -> Tensor:
        """A copy: the buffers change in the next step, when it may still be under way."""
        assert self._view is not None
        first, parts = number * CHUNK_BYTES, []
        for piece in self._view[2]:
            parts.append(piece[max(0, first) : max(0, first + CHUNK_BYTES)])
            first -= len(piece)
        return torch.cat(parts)

    def forget(self) -> None:
        """The step is over, and its buffers are about to change."""
        self._view = None
        self._given.clear()


@dataclass(slots=True)
class _Draft:
    """What is there of one state so far, and who gave it."""

    digest: str = ""
    num_chunks: int = 1
    chunks: list[Tensor] = field(default_factory=list)
    givers: set[PeerId] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        return len(self.chunks) >= self.num_chunks

    def fits(self, answer: StateChunk) -> bool:
        """Whether an answer is the next part of this state."""
        is_next = answer.digest == self.digest and 0 < answer.num_chunks <= MAX_CHUNKS
        return is_next and (not self.chunks or answer.num_chunks == self.num_chunks)


class Joiner:
    """Fetches the state of this node's stage, or of another one, from its holders."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._asked: tuple[PeerId, int, int] | None = None
        self._answer: tuple[StateChunk, Tensor | None] | None = None
        self._draft = _Draft()
        self._takes_all_from_one = False
        self._strikes: Counter[PeerId] = Counter()
        self._arrived = Signal()

    def deliver(self, envelope: Envelope) -> None:
        """Take the chunk that was asked for, and no other."""
        message = envelope.message
        assert isinstance(message, StateChunk)
        if (envelope.sender, message.step, message.chunk) == self._asked:
            self._answer = message, envelope.tensors[0] if envelope.tensors else None
            self._arrived.notify()

    async def fetch(self, decision: Decision) -> None:
        """Make this node's state the decided one; raise PeerError if no holder could give it.

        What has come so far stays for the next try at the same state.
        """
        ctx, digest = self._ctx, decision.digests[self._ctx.stage]
        data, givers = await self._whole(decision, ctx.stage)
        await ctx.faults.reach("in_state_transfer", decision.step)
        try:
            await ctx.compute("state", lambda: ctx.state.import_state(data, digest))
        except StateMismatch as error:
            self._on_mismatch(givers, error)
            raise ProtocolViolation("a holder sent a state with another digest") from error
        ctx.origin = f"another holder, at step {decision.step}"
        self._takes_all_from_one = False

    async def fetch_of(self, decision: Decision, stage: int) -> Tensor:
        """Return the decided state of another stage [bytes] uint8; raises what ``fetch`` does."""
        data, givers = await self._whole(decision, stage)
        digest = await self._ctx.compute("state", lambda: sha256(data.numpy().data).hexdigest())
        if digest != decision.digests[stage]:
            error = StateMismatch(f"the state of stage {stage} does not have the decided digest")
            self._on_mismatch(givers, error)
            raise ProtocolViolation("a holder sent a state with another digest") from error
        self._takes_all_from_one = False
        return data

    async def _whole(self, decision: Decision, stage: int) -> tuple[Tensor, set[PeerId]]:
        """Return the bytes of a stage's state, unchecked, and who gave them."""
        digest = decision.digests[stage]
        donors = [p for p in decision.roster[stage] if p != self._ctx.me]
        self._ctx.rng.shuffle(donors)
        donors.sort(key=self._distance)  # stable: equals stay shuffled
        if not donors:
            raise PeerGone(f"no other holder of stage {stage} to fetch the state from")
        if self._draft.digest != digest:
            self._draft = _Draft(digest)
        await self._fill(self._draft, FetchState(step=decision.step, stage=stage, chunk=0), donors)
        draft, self._draft = self._draft, _Draft()
        return torch.cat([c.reshape(-1).view(torch.uint8) for c in draft.chunks]), draft.givers

    def _on_mismatch(self, givers: set[PeerId], error: StateMismatch) -> None:
        """Who gave all of it is a liar. Among several nobody knows, so next time one gives all."""
        ctx = self._ctx
        ctx.observer.count("errors", code=error.code)
        ctx.observer.event(
            "state_refused", code=error.code, cause=error.cause, peers=sorted(givers)
        )
        self._takes_all_from_one = True
        if len(givers) == 1:
            self._strikes.update(givers)

    def _distance(self, donor: PeerId) -> tuple[int, float]:
        """The nearest first; who gave wrong states comes last."""
        rtt_s = self._ctx.network.rtt_s(donor)
        return self._strikes[donor], math.inf if rtt_s is None else rtt_s

    async def _fill(self, draft: _Draft, first: FetchState, donors: Sequence[PeerId]) -> None:
        """Chunk after chunk; a donor that fails or is busy is replaced at the same offset."""
        remaining, num_busy = list(donors), 0
        while not draft.is_whole:
            if not remaining:
                raise PeerGone(f"none of {len(donors)} holders gave the state")
            if num_busy >= len(remaining):
                await trio.sleep(BUSY_PAUSE_S * (1 + self._ctx.rng.random()))
                num_busy = 0
            donor = remaining[0]
            message = first.model_copy(update={"chunk": len(draft.chunks)})
            answer, tensor = await self._try(donor, message)
            if answer is not None and answer.is_busy:
                num_busy += 1
                remaining.append(remaining.pop(0))
            elif answer is None or tensor is None or not draft.fits(answer):
                remaining.pop(0)
            else:
                num_busy = 0
                self._take(draft, donor, answer, tensor)

    def _take(self, draft: _Draft, donor: PeerId, answer: StateChunk, tensor: Tensor) -> None:
        if self._takes_all_from_one and draft.givers - {donor}:
            draft.chunks.clear()  # of another one
            draft.givers.clear()
            return
        draft.num_chunks = answer.num_chunks
        draft.chunks.append(tensor)
        draft.givers.add(donor)

    async def _try(
        self, donor: PeerId, message: FetchState
    ) -> tuple[StateChunk | None, Tensor | None]:
        try:
            return await self._ask(donor, message)
        except PeerError as error:
            self._ctx.observer.count("errors", code=error.code)
            return None, None

    async def _ask(self, donor: PeerId, message: FetchState) -> tuple[StateChunk, Tensor | None]:
        ctx = self._ctx
        self._asked, self._answer = (donor, message.step, message.chunk), None
        try:
            await ctx.network.send(donor, message)
            with trio.move_on_after(ctx.deadlines.request_s):
                await self._arrived.until(lambda: self._answer is not None)
        finally:
            answer, self._asked, self._answer = self._answer, None, None
        if answer is None:
            raise PeerTimeout(f"{donor} did not send chunk {message.chunk} of its state")
        return answer
