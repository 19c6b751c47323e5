"""A session at the node that asked for it: who keeps the weights of its step, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import trio

from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.errors import PeerGone
from protocol.keys import PeerId
from protocol.messages import (
    Decision,
    Extend,
    FetchPinned,
    Pin,
    Pinned,
    SessionPurpose,
    StateChunk,
    Stuck,
    Unpin,
)
from protocol.ports import Envelope, Tensor
from protocol.ports import Pin as State

# Holders of a stage that are asked at first: one to work, one in case that it dies.
PINS_PER_STAGE = 2
Post = Callable[[tuple[PeerId, ...], Pin | Unpin], None]


@dataclass(slots=True)
class Stage:
    """The holders of one stage: whom to ask yet, who was asked, and who keeps it."""

    left: list[PeerId]
    asked: set[PeerId]
    held: set[PeerId]


class Session:
    """``begin`` it, use it, ``close`` it."""

    def __init__(
        self,
        ctx: Context,
        decision: Decision,
        number: int,
        purpose: SessionPurpose,
        num_positions: int,
        post: Post,
    ) -> None:
        self.ctx, self.decision, self.number = ctx, decision, number
        self.purpose, self._num_positions, self._post = purpose, num_positions, post
        self.step = decision.step
        self.state: State | None = None  # of this node's own stage
        self.stages = {k: self._stage(k) for k in range(1, ctx.num_stages + 1)}
        self.refusals: set[str] = set()
        self.news = Signal()
        self.answers: dict[int, Tensor] = {}  # by attempt: what came back from the last stage
        self.stuck: dict[int, Stuck] = {}
        self.gone: set[PeerId] = set()
        self._asked: tuple[PeerId, int, int] | None = None
        self._chunk: tuple[StateChunk, Tensor] | None = None

    def _stage(self, stage: int) -> Stage:
        """The nearest holders come first."""
        peers = [peer for peer in self.decision.roster[stage] if peer != self.ctx.me]
        self.ctx.rng.shuffle(peers)
        return Stage(sorted(peers, key=self._distance), set(), set())

    def _distance(self, peer: PeerId) -> float:
        rtt_s = self.ctx.network.rtt_s(peer)
        return math.inf if rtt_s is None else rtt_s

    # --- holders ---------------------------------------------------------------------------

    async def begin(self) -> bool:
        """Have the step's weights kept in every stage; False if that cannot be done now."""
        ctx = self.ctx
        is_whole = self.purpose == "export"
        self.state = await ctx.compute("state", lambda: ctx.state.pin(self.step, is_whole=is_whole))
        if self.state is None or self.state.digest != self.decision.digests[ctx.stage]:
            return False
        for stage in self.stages.values():
            self._ask(stage, PINS_PER_STAGE)
        for _ in range(2):  # those who say nothing are passed by
            with trio.move_on_after(ctx.deadlines.hop_floor_s):
                await self.news.until(self._is_settled)
            for stage in self.stages.values():
                if not stage.held:
                    self._ask(stage, len(stage.left))
        return all(stage.held for stage in self.stages.values())

    def _ask(self, stage: Stage, num_peers: int) -> None:
        chosen, stage.left = stage.left[:num_peers], stage.left[num_peers:]
        stage.asked.update(chosen)
        self._pin(next(k for k, s in self.stages.items() if s is stage), tuple(chosen))

    def _pin(self, stage: int, peers: tuple[PeerId, ...]) -> None:
        order = Pin(
            step=self.step, owner=self.ctx.me, session=self.number, stage=stage,
            purpose=self.purpose, num_positions=self._num_positions,
        )  # fmt: skip
        self._post(peers, order)

    def _is_settled(self) -> bool:
        """Whether every holder that was asked has answered, and each stage has one."""
        return all(
            (s.held and not s.asked) or not (s.asked or s.left) for s in self.stages.values()
        )

    def keep(self) -> None:
        """Tell the holders that the session lives."""
        for number, stage in self.stages.items():
            self._pin(number, tuple(sorted(stage.held)))

    def close(self) -> None:
        """Let everybody forget it."""
        peers = {p for s in self.stages.values() for p in (*s.held, *s.asked)}
        order = Unpin(step=self.step, owner=self.ctx.me, session=self.number)
        self._post(tuple(sorted(peers)), order)

    # --- what arrives ----------------------------------------------------------------------

    def deliver(self, envelope: Envelope) -> None:
        """Take a message of this session."""
        message = envelope.message
        if isinstance(message, Pinned):
            self._on_pinned(message, envelope.sender)
        elif isinstance(message, Stuck):
            self.stuck[message.attempt] = message
        elif isinstance(message, Extend) and self._is_answer(message, envelope.sender):
            for tensor in envelope.tensors:
                self.answers[message.attempt] = tensor
        self.news.notify()

    def _is_answer(self, message: Extend, sender: PeerId) -> bool:
        last = self.ctx.num_stages
        return message.stage == last + 1 and sender in self.stages[last].held

    def _on_pinned(self, message: Pinned, sender: PeerId) -> None:
        stage = self.stages.get(message.stage)
        if stage is None or sender not in stage.asked | stage.held:
            return
        stage.asked.discard(sender)
        if message.digest == self.decision.digests[message.stage]:
            stage.held.add(sender)
            return
        stage.held.discard(sender)  # it has forgotten the session
        self.refusals.add(message.refusal or "it holds another state")
        if not stage.held:
            self._ask(stage, 1)

    def lose(self, peer: PeerId) -> None:
        """The connection to a peer broke."""
        self.gone.add(peer)
        for stage in self.stages.values():
            stage.asked.discard(peer)
        self.news.notify()

    # --- the state's chunks ----------------------------------------------------------------

    def takes(self, envelope: Envelope) -> bool:
        """Take the chunk that was asked for, and no other."""
        message = envelope.message
        assert isinstance(message, StateChunk)
        name = (envelope.sender, message.stage, message.chunk)
        if name != self._asked or message.step != self.step or len(envelope.tensors) != 1:
            return False
        self._chunk = message, envelope.tensors[0]
        self.news.notify()
        return True

    async def fetch(self, peer: PeerId, stage: int, chunk: int) -> tuple[StateChunk, Tensor]:
        """Fetch one chunk of a pinned state; raise PeerError if the holder does not send it."""
        ctx = self.ctx
        message = FetchPinned(
            step=self.step, owner=ctx.me, session=self.number, stage=stage, chunk=chunk
        )
        self._asked, self._chunk = (peer, stage, chunk), None
        try:
            await ctx.network.send(peer, message)
            with trio.move_on_after(ctx.deadlines.request_s):
                await self.news.until(lambda: self._chunk is not None or peer in self.gone)
        finally:
            answer, self._asked, self._chunk = self._chunk, None, None
        if answer is None:
            raise PeerGone(f"{peer} did not send chunk {chunk} of stage {stage}")
        return answer
