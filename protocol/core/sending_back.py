"""The gradient's way to the stage before: to whoever sent the activation, or its replacement."""

from __future__ import annotations

import trio

from protocol.core.context import Context
from protocol.core.handing_on import PAUSE_LIMIT_S
from protocol.core.passage import OFFER_PAUSE_S, Passage
from protocol.keys import PeerId
from protocol.messages import Backward, Decision, Forward


class SendingBack:
    """What a hop has under way to the stage before, in one step."""

    def __init__(self, ctx: Context, decision: Decision) -> None:
        self._ctx = ctx
        self.decision = decision

    def on_source(self, passage: Passage, message: Forward, sender: PeerId) -> None:
        """A further branch reaches this hop: of a repair, the gradient goes there from now on."""
        passage.sources[sender] = message.path
        if message.is_repair or passage.source is None:
            passage.source = sender
            passage.returned_to.discard(sender)
            passage.news.notify()

    async def send_back(self, passage: Passage) -> PeerId | None:
        """Send the stored gradient to the source, or another that is known; None if that worked.

        Else the last source that was tried: nobody of the stage before has it.
        """
        while not passage.is_ended and passage.source is not None:
            peer = passage.source
            if peer == passage.id.data_node:
                await self._bring_back(passage)
                return None
            await self._offer(passage, peer)
            if passage.is_ended or passage.source != peer or peer in passage.returned_to:
                return None  # whoever changed the source sends to it
            passage.refused_by.add(peer)
            others = [p for p in passage.sources if p not in passage.refused_by]
            if not others:
                return peer
            passage.source = others[-1]
        return None

    async def _offer(self, passage: Passage, peer: PeerId) -> None:
        times, started = self._ctx.times, trio.current_time()
        passage.refused_by.discard(peer)
        with trio.move_on_after(times.hop_limit_s(peer, "backward")):
            if not await self._send(passage, peer):
                return
            times.delivered(peer, trio.current_time() - started)
            await passage.news.until(
                lambda: bool(
                    passage.is_ended or passage.source != peer or peer in passage.returned_to
                )
            )
        if peer in passage.returned_to:
            times.answered(peer, "backward", trio.current_time() - started)
        elif passage.source == peer and not passage.is_ended:
            times.silent(peer, "backward")

    async def _bring_back(self, passage: Passage) -> None:
        """The data node is the source: it alone can end the try."""
        pause_s = OFFER_PAUSE_S
        while passage.id.data_node in self.decision.data_nodes and not passage.is_ended:
            if await self._send(passage, passage.id.data_node):
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_LIMIT_S)

    async def _send(self, passage: Passage, peer: PeerId) -> bool:
        ctx, work = self._ctx, passage.id
        assert passage.gradient is not None
        stage = ctx.stage - 1 if ctx.stage else ctx.num_stages
        message = Backward(
            step=work.step, data_node=work.data_node, slot=work.slot, attempt=work.attempt,
            stage=stage, path=(ctx.me, *passage.trail) if ctx.stage else (),
        )  # fmt: skip
        is_sent = await ctx.try_send(peer, message, (passage.gradient,))
        if is_sent and ctx.stage:
            await ctx.faults.reach("after_input_gradient", work.step)
        return is_sent

    def on_computed(self, passage: Passage, peer: PeerId) -> None:
        """The source has computed its part."""
        if peer in passage.sources:
            passage.returned_to.add(peer)
            passage.news.notify()
