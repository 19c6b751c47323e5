"""A holder's part in sessions: weights of one step that it keeps for others, and their caches.

What it keeps is bounded in number, bytes and time. A session that nobody speaks of for
``pin_silence_s`` is forgotten, and each one after ``pin_age_s``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from protocol.core.beginning import Beginning
from protocol.core.context import Context
from protocol.core.transfer import CHUNK_BYTES
from protocol.deadlines import Deadlines
from protocol.errors import NonFinite, PeerError, ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import (
    Decision,
    Extend,
    FetchInitial,
    FetchPinned,
    Pin,
    Pinned,
    StateChunk,
    Stuck,
    Unpin,
)
from protocol.ports import Cache, Envelope, Observer, Tensor
from protocol.ports import Pin as State

MOST = 32
MOST_OF_ONE = 8
INBOX = 256
OPEN_PER_SENDER = 64
Name = tuple[PeerId, int]


@dataclass(slots=True)
class Kept:
    """One session at this holder; ``num_bytes`` is what it may come to take."""

    order: Pin
    state: State
    num_bytes: int
    began_at: float
    heard_at: float
    cache: Cache | None = None
    attempt: int = -1
    turn: trio.Lock = field(default_factory=trio.Lock)


class KeptSessions:
    """``room_bytes`` is what all sessions together may take."""

    def __init__(
        self,
        context: Callable[[], Context | None],
        decision: Callable[[], Decision | None],
        room_bytes: int,
        deadlines: Deadlines,
        observer: Observer,
        beginning: Beginning,
    ) -> None:
        self._context, self._decision = context, decision
        self._room_bytes, self._deadlines, self._observer = room_bytes, deadlines, observer
        self._beginning = beginning
        self._kept: dict[Name, Kept] = {}
        self._inbox, self._outbox = trio.open_memory_channel[Envelope](INBOX)
        self._open: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What the sessions may come to take."""
        return sum(kept.num_bytes for kept in self._kept.values())

    def take(self, envelope: Envelope) -> None:
        """Take a message for a holder; ProtocolViolation when its sender floods this node."""
        if self._open[envelope.sender] >= OPEN_PER_SENDER:
            raise ProtocolViolation("more messages of sessions than this node can take")
        try:
            self._inbox.send_nowait(envelope)
        except trio.WouldBlock:
            self._observer.count("errors", code="resource")
        else:
            self._open[envelope.sender] += 1

    async def run(self) -> None:
        """Serve until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._expire)
            async for envelope in self._outbox:
                nursery.start_soon(self._guarded, envelope)

    def clear(self) -> None:
        """The stage is another one now: nothing of the old one is kept."""
        self._kept.clear()
        self._measure()

    def lose(self, owner: PeerId) -> None:
        """The session with an owner broke: if it does not come back, nobody needs what is kept."""
        limits = self._deadlines
        latest = trio.current_time() - limits.pin_silence_s + limits.session_silence_s
        for (peer, _), kept in self._kept.items():
            if peer == owner:
                kept.heard_at = min(kept.heard_at, latest)

    async def _expire(self) -> None:
        limits = self._deadlines
        while True:
            now = trio.current_time()
            for name, kept in list(self._kept.items()):
                is_silent = now - kept.heard_at > limits.pin_silence_s
                if is_silent or now - kept.began_at > limits.pin_age_s:
                    self._forget(name)
            await trio.sleep(limits.heartbeat_s)

    def _forget(self, name: Name) -> None:
        self._kept.pop(name, None)
        self._measure()

    def _measure(self) -> None:
        self._observer.gauge("pins", len(self._kept))
        self._observer.gauge("pinned_bytes", self.num_bytes)

    # --- messages --------------------------------------------------------------------------

    async def _guarded(self, envelope: Envelope) -> None:
        """The boundary where the fault of one message's sender ends."""
        try:
            await self._dispatch(envelope)
        except PeerError as error:
            self._observer.count("errors", code=error.code)
        finally:
            self._open[envelope.sender] -= 1
            if not self._open[envelope.sender]:
                del self._open[envelope.sender]

    async def _dispatch(self, envelope: Envelope) -> None:
        message, sender, ctx = envelope.message, envelope.sender, self._context()
        if isinstance(message, Unpin) and sender == message.owner:
            self._forget((message.owner, message.session))
        elif isinstance(message, FetchInitial):
            await self._beginning.serve(message, sender)
        elif ctx is None:
            return
        elif isinstance(message, Pin) and sender == message.owner:
            await self._on_pin(ctx, message)
        elif isinstance(message, FetchPinned) and sender == message.owner:
            await self._on_fetch(ctx, message)
        elif isinstance(message, Extend) and len(envelope.tensors) == 1:
            await self._on_extend(ctx, message, sender, envelope.tensors[0])

    async def _on_pin(self, ctx: Context, message: Pin) -> None:
        name = (message.owner, message.session)
        refusal = "" if name in self._kept else await self._begin(ctx, name, message)
        kept = self._kept.get(name)
        if kept is not None:
            kept.heard_at = trio.current_time()
        answer = Pinned(
            step=message.step, owner=message.owner, session=message.session, stage=ctx.stage,
            digest=kept.state.digest if kept else None, refusal=refusal,
        )  # fmt: skip
        await ctx.try_send(message.owner, answer)

    async def _begin(self, ctx: Context, name: Name, message: Pin) -> str:
        """Keep the state; return why not, or nothing."""
        if refusal := self._refusal(ctx, message):
            return refusal
        is_whole = message.purpose == "export"
        state = await ctx.compute("state", lambda: ctx.state.pin(message.step, is_whole=is_whole))
        if state is None:
            return f"the state of step {message.step} is not here"
        num_bytes = state.num_bytes
        if not is_whole:
            num_bytes += ctx.blocks.cache_bytes(message.num_positions)
        if self.num_bytes + num_bytes > self._room_bytes:
            return "no memory for it now"
        if self._context() is ctx and name not in self._kept:
            now = trio.current_time()
            self._kept[name] = Kept(message, state, num_bytes, began_at=now, heard_at=now)
            self._measure()
        return ""

    def _refusal(self, ctx: Context, message: Pin) -> str:
        decision, owner = self._decision(), message.owner
        is_data_node = decision is not None and owner in decision.data_nodes
        if message.stage != ctx.stage or ctx.stage == 0:
            return "another stage"
        if message.purpose == "export":
            if not ctx.manifest.may_export(owner, is_data_node=is_data_node):
                return "the manifest does not allow it"
        elif not (is_data_node and 0 < message.num_positions <= ctx.manifest.model.context):
            return "only data nodes generate, within the context"
        num_of_owner = sum(peer == owner for peer, _ in self._kept)
        is_full = len(self._kept) >= MOST or num_of_owner >= MOST_OF_ONE
        return "too many sessions" if is_full else ""

    async def _on_fetch(self, ctx: Context, message: FetchPinned) -> None:
        """Send one chunk; one after the other, however many are asked for."""
        kept = self._kept.get((message.owner, message.session))
        if kept is None or kept.order.purpose != "export" or message.stage != kept.order.stage:
            return
        kept.heard_at = trio.current_time()
        state = kept.state
        async with kept.turn:
            num_chunks = state.num_chunks(CHUNK_BYTES)
            if message.chunk >= num_chunks:
                return
            chunk = await ctx.compute("state", lambda: state.chunk(message.chunk, CHUNK_BYTES))
            answer = StateChunk(
                step=state.step, stage=ctx.stage, chunk=message.chunk, num_chunks=num_chunks,
                digest=state.digest,
            )  # fmt: skip
            await ctx.try_send(message.owner, answer, (chunk,))

    # --- generation ------------------------------------------------------------------------

    async def _on_extend(
        self, ctx: Context, message: Extend, sender: PeerId, h_BTW: Tensor
    ) -> None:
        """Compute the new tokens and hand them on, or tell the owner why not."""
        kept = self._kept.get((message.owner, message.session))
        if message.stage != ctx.stage or not self._may_extend(message, sender):
            return
        if kept is None or kept.order.purpose != "generate":
            await self._be_stuck(ctx, message, ctx.stage, ctx.me, "the session is unknown")
            return
        kept.heard_at = trio.current_time()
        async with kept.turn:
            if message.attempt < kept.attempt:
                return
            if message.attempt > kept.attempt:
                self._restart(ctx, kept, message.attempt)
            output_BTW = await self._extended(ctx, kept, message, h_BTW)
        if output_BTW is None:
            await self._be_stuck(ctx, message, ctx.stage, ctx.me, "the tokens do not fit")
        else:
            await self._hand_on(ctx, message, output_BTW)

    def _may_extend(self, message: Extend, sender: PeerId) -> bool:
        decision = self._decision()
        if message.stage == 1:
            return sender == message.owner
        return decision is not None and decision.stage_of(sender) == message.stage - 1

    def _restart(self, ctx: Context, kept: Kept, attempt: int) -> None:
        kept.attempt = attempt
        kept.cache = ctx.blocks.open_cache(kept.state, kept.order.num_positions)

    async def _extended(
        self, ctx: Context, kept: Kept, message: Extend, h_BTW: Tensor
    ) -> Tensor | None:
        cache = kept.cache
        if cache is None or cache.num_tokens != message.position:
            return None
        try:
            return await ctx.compute("forward", lambda: ctx.blocks.extend(cache, h_BTW))
        except (NonFinite, ProtocolViolation) as error:
            self._observer.count("errors", code=error.code)
            return None

    async def _hand_on(self, ctx: Context, message: Extend, output_BTW: Tensor) -> None:
        is_last = ctx.stage == ctx.num_stages
        if is_last or not message.route:
            peer, output_BTW = message.owner, output_BTW[:, -1:].contiguous()
        else:
            peer = message.route[0]
        onward = message.model_copy(
            update={"stage": ctx.stage + 1, "route": message.route[1:]},
        )
        if not await ctx.try_send(peer, onward, (output_BTW,)):
            await self._be_stuck(ctx, message, ctx.stage + 1, peer, "it cannot be reached")

    async def _be_stuck(
        self, ctx: Context, message: Extend, stage: int, peer: PeerId, reason: str
    ) -> None:
        stuck = Stuck(
            step=message.step, owner=message.owner, session=message.session, stage=stage,
            attempt=message.attempt, peer=peer, reason=reason,
        )  # fmt: skip
        await ctx.try_send(message.owner, stuck)
