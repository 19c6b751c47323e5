"""The activation's way to the next stage: offer it until a holder there has computed it.

A next hop that is gone or full is passed by; one that gives no sign of life in time is suspected,
softly: another one gets the stored output, and whichever of the two answers is good.
"""

from __future__ import annotations

import trio

from protocol.core.context import Context
from protocol.core.passage import Passage, Route
from protocol.keys import PeerId
from protocol.messages import Decision, Forward

PAUSE_LIMIT_S = 1.0


class HandingOn:
    """What a hop has under way to the next stage, in one step."""

    def __init__(self, ctx: Context, decision: Decision) -> None:
        self._ctx = ctx
        self.decision = decision

    async def hand_on(self, passage: Passage) -> bool:
        """Return when somebody has computed the activation or nobody needs it any more.

        False: there is no holder of the next stage at all.
        """
        passage.is_offering = True
        try:
            while not passage.is_ended and not passage.taken:
                peer = self._choose(passage)
                if peer is not None:
                    await self._offer(passage, peer)
                elif not passage.avoid:
                    return False
                else:
                    passage.avoid.clear()
                    await self.pause(passage)
            return True
        finally:
            passage.is_offering = False

    async def pause(self, passage: Passage) -> None:
        """Each offer carries the whole activation, so they become rarer."""
        await trio.sleep(passage.pause_s)
        passage.pause_s = min(2 * passage.pause_s, PAUSE_LIMIT_S)

    def _choose(self, passage: Passage) -> PeerId | None:
        ctx, stage = self._ctx, self._ctx.stage + 1
        if stage > ctx.num_stages:
            is_there = passage.id.data_node in self.decision.data_nodes
            return passage.id.data_node if is_there else None
        if passage.target is not None and stage == passage.target_stage:
            return passage.target
        known = passage.route[0] if passage.route else None
        if known not in {None, *passage.avoid} and known in self.decision.roster[stage]:
            return known
        return ctx.router.choose(
            stage, passage.avoid, trio.current_time(),
            data_node=passage.id.data_node, previous=passage.source,
        )  # fmt: skip

    async def _offer(self, passage: Passage, peer: PeerId) -> None:
        """Send it and wait for a sign of life; whoever gives none is passed by from now on."""
        passage.next = peer
        passage.lost.discard(peer)
        passage.busy.discard(peer)
        passage.replaced.discard(peer)
        passage.offered_at[peer] = trio.current_time()
        self._count(passage, peer)
        if self._ctx.stage == self._ctx.num_stages:
            await self._bring_home(passage, peer)
            return
        is_sent = False
        with trio.move_on_after(self._ctx.times.hop_limit_s(peer, "forward")) as limit:
            is_sent = await self._send(passage, peer)
            if is_sent:
                await passage.news.until(lambda: self._is_answered(passage, peer))
        if not passage.is_ended and not passage.taken:
            self._pass_by(passage, peer, is_refused=not is_sent and not limit.cancelled_caught)

    def _is_answered(self, passage: Passage, peer: PeerId) -> bool:
        return bool(
            passage.taken or passage.is_ended or peer in passage.busy or peer in passage.lost
        )

    async def _bring_home(self, passage: Passage, data_node: PeerId) -> None:
        """The data node's answer is the gradient; it alone can end the try."""
        if await self._send(passage, data_node):
            passage.taken.add(data_node)
        else:
            await self.pause(passage)

    async def _send(self, passage: Passage, peer: PeerId) -> bool:
        ctx, work = self._ctx, passage.id
        assert passage.output is not None
        is_first = ctx.stage == 0
        path = () if is_first or passage.source is None else passage.sources[passage.source]
        message = Forward(
            step=work.step, data_node=work.data_node, slot=work.slot, attempt=work.attempt,
            stage=ctx.stage + 1, path=path if is_first else (*path, ctx.me),
            purpose=passage.purpose, target_stage=passage.target_stage, target=passage.target,
            is_repair=passage.is_repair, route=passage.route[1:],
        )  # fmt: skip
        started = trio.current_time()
        is_sent = await ctx.try_send(peer, message, (passage.output,))
        if is_sent:
            ctx.times.delivered(peer, trio.current_time() - started)
        return is_sent

    def _pass_by(self, passage: Passage, peer: PeerId, *, is_refused: bool) -> None:
        """Another one is to have it: the peer is full, gone, or silent for too long."""
        passage.avoid.add(peer)
        if peer in passage.busy:
            self.uncount(passage, peer, is_fault=False)
            return
        if is_refused and peer not in passage.lost:
            self.uncount(passage, peer, is_fault=True)
            return
        if peer not in passage.lost:
            self._ctx.times.silent(peer, "forward")
        self._repairing(passage, peer, "silent" if peer not in passage.lost else "gone")

    # --- what the next hops say ------------------------------------------------------------

    def on_computed(self, passage: Passage, peer: PeerId) -> None:
        """A next hop has it, also one that was suspected."""
        if peer not in passage.offered_at or passage.is_ended:
            return
        if peer not in passage.taken:
            seconds = trio.current_time() - passage.offered_at[peer]
            self._ctx.times.answered(peer, "forward", seconds)
        self._believe(passage, peer)

    def on_home(self, passage: Passage, peer: PeerId) -> None:
        """What came through all stages came through a next hop, also one that said nothing yet."""
        if peer in passage.offered_at:
            self._believe(passage, peer)

    def on_gradient(self, passage: Passage, peer: PeerId) -> None:
        """The best sign of life."""
        self._believe(passage, peer)
        if peer in passage.counted:
            now = trio.current_time()
            seconds = now - passage.offered_at[peer]
            self._ctx.router.returned(peer, seconds, now, data_node=passage.id.data_node)
            passage.counted.discard(peer)
        self.uncount_all(passage)

    def _believe(self, passage: Passage, peer: PeerId) -> None:
        passage.taken.add(peer)
        passage.lost.discard(peer)
        passage.avoid.discard(peer)
        self._count(passage, peer)
        if passage.next not in passage.taken:
            passage.next = peer
        passage.news.notify()

    def on_busy(self, passage: Passage, peer: PeerId) -> None:
        """A next hop has no room."""
        if peer == passage.next and peer not in passage.taken:
            passage.busy.add(peer)
            passage.news.notify()

    def lose(self, passage: Passage, peer: PeerId) -> bool:
        """A peer is gone. Whether it had passed the activation on: then the data node decides."""
        if peer not in passage.offered_at or passage.is_back or passage.is_ended:
            return False
        was_taken = peer in passage.taken and peer == passage.next
        passage.taken.discard(peer)
        passage.lost.add(peer)
        passage.avoid.add(peer)
        self.uncount(passage, peer, is_fault=True)
        passage.news.notify()
        return was_taken

    async def resume(self, passage: Passage, peer: PeerId, route: Route) -> bool:
        """Replace a lost next hop by another one, which goes on along ``route``; see hand_on."""
        if passage.is_ended or passage.is_back or peer in passage.replaced:
            return True
        if peer not in passage.offered_at or passage.output is None:
            return True
        passage.replaced.add(peer)
        passage.lost.add(peer)
        passage.avoid.add(peer)
        passage.taken.clear()
        passage.route = (None, *route)
        self._repairing(passage, peer, "lost on the way back")
        passage.news.notify()
        return passage.is_offering or await self.hand_on(passage)

    def _repairing(self, passage: Passage, peer: PeerId, cause: str) -> None:
        """A branch begins: it goes before others where it meets what was there."""
        passage.is_repair = True
        self.uncount(passage, peer, is_fault=True)
        self._ctx.observer.count("path_repairs")
        self._ctx.observer.event(
            "path_repaired", slot=passage.id.slot, stage=self._ctx.stage + 1, cause=cause
        )

    # --- the router's count ----------------------------------------------------------------

    def _count(self, passage: Passage, peer: PeerId) -> None:
        if peer not in passage.counted:
            passage.counted.add(peer)
            self._ctx.router.sent(peer, trio.current_time(), data_node=passage.id.data_node)

    def uncount(self, passage: Passage, peer: PeerId, *, is_fault: bool) -> None:
        """Nothing will come back from a peer."""
        if peer in passage.counted:
            passage.counted.discard(peer)
            self._ctx.router.lost(
                peer, trio.current_time(), data_node=passage.id.data_node, is_fault=is_fault
            )

    def uncount_all(self, passage: Passage, *, is_fault: bool = False) -> None:
        """The try came to its end."""
        for peer in sorted(passage.counted):
            self.uncount(passage, peer, is_fault=is_fault)
