"""State transfer between holders of a stage: chunked, checked, resumable from another donor.

A donor serves the state at the start of its current step, which no one changes during the step.
A joiner takes chunks from any holder, because all replicas are bit-identical; only the digest
that the swarm decided makes the whole acceptable.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
import trio

from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.errors import PeerError, PeerGone, PeerTimeout, ProtocolViolation, StateMismatch
from protocol.keys import PeerId
from protocol.messages import Decision, FetchState, StateChunk
from protocol.ports import Envelope, Tensor

CHUNK_BYTES = 2 * 2**20
DONOR_PAUSE_S = 0.5
MAX_CHUNKS = 2**24
# Joiners that are sent a chunk at the same time; the others wait for their turn.
MOST_AT_ONCE = 4
# How often one peer may be sent the whole state of a step: transfers fail and begin again.
MOST_TIMES = 4


class Donor:
    """Serves this node's state to joiners; keeps the bytes of one step."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._step = -1
        self._digest = ""
        self._chunks: tuple[Tensor, ...] = ()
        self._lock = trio.Lock()
        self._served: set[PeerId] = set()
        self._given: Counter[PeerId] = Counter()
        self._turns = trio.CapacityLimiter(MOST_AT_ONCE)

    async def serve(self, message: FetchState, sender: PeerId) -> None:
        """Answer with one chunk, or without a tensor when that step's state is not held.

        Each peer gets one chunk at a time: who asks for more at once gets nothing more. Nor does
        who has been sent the state several times already.
        """
        if sender in self._served:
            return
        self._served.add(sender)
        try:
            async with self._turns:
                await self._answer(message, sender)
        finally:
            self._served.discard(sender)

    async def _answer(self, message: FetchState, sender: PeerId) -> None:
        ctx = self._ctx
        async with self._lock:
            if message.step == ctx.state.step and self._step != message.step:
                await self._export()
        num_chunks = len(self._chunks)
        has_it = (
            (self._step, ctx.stage) == (message.step, message.stage)
            and message.chunk < num_chunks
            and self._given[sender] < MOST_TIMES * num_chunks
        )
        reply = StateChunk(
            step=message.step, stage=ctx.stage, chunk=message.chunk,
            num_chunks=num_chunks if has_it else 0,
            digest=self._digest if has_it else None,
        )  # fmt: skip
        self._given[sender] += has_it
        await ctx.try_send(sender, reply, (self._chunks[message.chunk],) if has_it else ())

    def forget(self) -> None:
        """Free the bytes of a past step."""
        self._step, self._chunks = -1, ()
        self._given.clear()

    async def _export(self) -> None:
        ctx = self._ctx

        def job() -> tuple[int, str, Tensor]:
            return ctx.state.step, ctx.state.digest, ctx.state.export_state()

        self._step, self._digest, data = await ctx.compute("state", job)
        self._chunks = torch.split(data, CHUNK_BYTES)
        self._given.clear()


class Joiner:
    """Fetches the state of this node's stage from its holders."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._asked: tuple[PeerId, int, int] | None = None
        self._answer: tuple[StateChunk, Tensor | None] | None = None
        self._distrusted: set[PeerId] = set()
        self._arrived = Signal()

    def deliver(self, envelope: Envelope) -> None:
        """Take the chunk that was asked for, and no other."""
        message = envelope.message
        assert isinstance(message, StateChunk)
        if (envelope.sender, message.step, message.chunk) == self._asked:
            self._answer = message, envelope.tensors[0] if envelope.tensors else None
            self._arrived.notify()

    async def fetch(self, decision: Decision) -> None:
        """Make this node's state the decided one; raise PeerError if no holder could give it."""
        ctx = self._ctx
        donors = [p for p in decision.roster[ctx.stage] if p != ctx.me]
        ctx.rng.shuffle(donors)
        donors.sort(key=self._distance)  # stable: equals stay shuffled
        if not donors:
            raise PeerGone(f"no other holder of stage {ctx.stage} to fetch the state from")
        data, givers = await self._fetch_chunks(decision, donors)
        digest = decision.digests[ctx.stage]
        await ctx.faults.reach("in_state_transfer", decision.step)
        try:
            await ctx.compute("state", lambda: ctx.state.import_state(data, digest))
        except StateMismatch as error:
            ctx.observer.count("errors", code=error.code)
            self._distrusted |= givers
            raise ProtocolViolation("a holder sent a state with another digest") from error

    def _distance(self, donor: PeerId) -> tuple[bool, float]:
        """The nearest first; who once gave a wrong state comes last."""
        rtt_s = self._ctx.network.rtt_s(donor)
        return donor in self._distrusted, math.inf if rtt_s is None else rtt_s

    async def _fetch_chunks(
        self, decision: Decision, donors: Sequence[PeerId]
    ) -> tuple[Tensor, set[PeerId]]:
        """Chunk after chunk; a donor that fails is replaced at the same offset.

        Return the bytes and who gave them.
        """
        digest = decision.digests[self._ctx.stage]
        chunks: list[Tensor] = []
        givers: set[PeerId] = set()
        num_chunks = 1
        remaining = list(donors)
        while len(chunks) < num_chunks:
            if not remaining:
                raise PeerGone(f"none of {len(donors)} holders gave the state")
            try:
                answer, tensor = await self._ask(remaining[0], decision.step, len(chunks))
            except PeerError as error:
                self._ctx.observer.count("errors", code=error.code)
                remaining.pop(0)
                continue
            is_usable = answer.digest == digest and answer.num_chunks <= MAX_CHUNKS
            if tensor is None or not is_usable or (chunks and answer.num_chunks != num_chunks):
                remaining.pop(0)
                continue
            num_chunks = answer.num_chunks
            chunks.append(tensor)
            givers.add(remaining[0])
        return torch.cat([c.reshape(-1).view(torch.uint8) for c in chunks]), givers

    async def _ask(self, donor: PeerId, step: int, chunk: int) -> tuple[StateChunk, Tensor | None]:
        ctx = self._ctx
        message = FetchState(step=step, stage=ctx.stage, chunk=chunk)
        self._asked, self._answer = (donor, step, chunk), None
        try:
            await ctx.network.send(donor, message)
            with trio.move_on_after(ctx.deadlines.request_s):
                await self._arrived.until(lambda: self._answer is not None)
        finally:
            answer, self._asked, self._answer = self._answer, None, None
        if answer is None:
            raise PeerTimeout(f"{donor} did not send chunk {chunk} of its state")
        return answer
