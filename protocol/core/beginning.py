"""The weights that a manifest names for step 0: from the own disk, or else from an authority."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import trio

from protocol.core.context import Context
from protocol.core.signal import Signal
from protocol.deadlines import Deadlines
from protocol.errors import PeerError, PeerGone, PeerTimeout, StateMismatch
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import FetchInitial, StateChunk
from protocol.ports import Envelope, InitialWeights, Network, Observer, Tensor

PAUSE_S = 0.5
PAUSE_LIMIT_S = 5.0


class Beginning:
    """Serves what this node's disk has of them, and fetches those of its stage."""

    def __init__(
        self,
        manifest: Manifest,
        network: Network,
        disk: InitialWeights | None,
        deadlines: Deadlines,
        observer: Observer,
    ) -> None:
        self._manifest, self._network, self._disk = manifest, network, disk
        self._deadlines, self._observer = deadlines, observer
        self._asked: tuple[PeerId, int, int] | None = None
        self._answer: tuple[StateChunk, Tensor] | None = None
        self._arrived = Signal()

    async def serve(self, message: FetchInitial, sender: PeerId) -> None:
        """Answer with one chunk, if the manifest names one and the disk has it."""
        if self._disk is None or not self._knows(message.stage):
            return
        found = await self._disk.chunk(message.stage, message.chunk)
        if found is None:
            return
        num_chunks, chunk = found
        answer = StateChunk(
            step=0, stage=message.stage, chunk=message.chunk, num_chunks=num_chunks,
            digest=self._manifest.initial[message.stage],
        )  # fmt: skip
        await self._network.send(sender, answer, (chunk,))

    def takes(self, envelope: Envelope) -> bool:
        """Take the chunk that was asked for, and no other."""
        message = envelope.message
        assert isinstance(message, StateChunk)
        if (envelope.sender, message.stage, message.chunk) != self._asked or not self._knows(
            message.stage
        ):
            return False
        if message.digest != self._manifest.initial[message.stage] or len(envelope.tensors) != 1:
            return False
        self._answer = message, envelope.tensors[0]
        self._arrived.notify()
        return True

    async def begin(self, ctx: Context, changed: Signal, is_late: Callable[[], bool]) -> None:
        """Give a stage at step 0 the weights that the manifest names, unless it is too late."""
        if not self._manifest.initial or ctx.state.step:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when, is_late, changed, nursery.cancel_scope)
            await self._take(ctx)
            nursery.cancel_scope.cancel()

    async def _take(self, ctx: Context) -> None:
        digest = self._manifest.initial[ctx.stage]
        while True:
            data = await self.fetch(ctx.stage)
            try:
                await ctx.compute("state", partial(ctx.state.begin_with, data, digest))
            except StateMismatch as error:
                ctx.observer.count("errors", code=error.code)
                ctx.observer.event("initial_weights_wrong", code=error.code, cause=error.cause)
                await trio.sleep(PAUSE_LIMIT_S)
            else:
                return

    async def fetch(self, stage: int) -> Tensor:
        """Return the bytes of a stage's weights; ask again and again until somebody has them."""
        pause_s, told = PAUSE_S, ""
        sources: Sequence[PeerId | None] = (None, *self._manifest.authorities)
        while True:
            for source in sources:
                if source == self._network.peer_id:
                    continue
                try:
                    return await self._fetch_from(source, stage)
                except PeerError as error:
                    cause = error.cause
            if cause != told:
                self._observer.event("initial_weights_missing", stage=stage, cause=cause)
            told = cause
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LIMIT_S)

    def _knows(self, stage: int) -> bool:
        return stage < len(self._manifest.initial)

    async def _fetch_from(self, source: PeerId | None, stage: int) -> Tensor:
        chunks: list[Tensor] = []
        num_chunks = 1
        while len(chunks) < num_chunks:
            if source is None:
                found = await self._disk.chunk(stage, len(chunks)) if self._disk else None
                if found is None:
                    raise PeerGone("they are not on this node's disk")
                num_chunks, chunk = found
            else:
                answer, chunk = await self._ask(source, stage, len(chunks))
                num_chunks = answer.num_chunks
            chunks.append(chunk)
        return torch.cat([chunk.reshape(-1) for chunk in chunks])

    async def _ask(self, source: PeerId, stage: int, chunk: int) -> tuple[StateChunk, Tensor]:
        message = FetchInitial(step=0, stage=stage, chunk=chunk)
        self._asked, self._answer = (source, stage, chunk), None
        try:
            await self._network.send(source, message)
            with trio.move_on_after(self._deadlines.request_s):
                await self._arrived.until(lambda: self._answer is not None)
        finally:
            answer, self._asked, self._answer = self._answer, None, None
        if answer is None:
            raise PeerTimeout(f"{source} did not send chunk {chunk} of the first weights")
        return answer


async def _cancel_when(
    is_late: Callable[[], bool], changed: Signal, scope: trio.CancelScope
) -> None:
    await changed.until(is_late)
    scope.cancel()
