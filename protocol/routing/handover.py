"""Draining (spec 1.4): a holder that leaves offers each of its flows to peers of its stage.

It shows them its units; whoever has room takes one by a token, ``p->me->x`` becomes ``p->b->x`` at
once and everywhere, whatever that costs: the labels make it cheap later. What nobody took within
``handover_ticks`` is pushed back and looks for another way itself.
"""

from __future__ import annotations

from protocol.keys import PeerId
from protocol.messages.routing import FlowRelease, FlowState
from protocol.routing.context import Context
from protocol.routing.exchange import Exchange
from protocol.routing.tables import InEdge


class Handover:
    """Begun by ``begin``. A data node's flows are its own: they end when it is gone."""

    def __init__(self, ctx: Context, exchange: Exchange) -> None:
        self._ctx = ctx
        self._exchange = exchange
        self._until = 0

    def begin(self) -> None:
        """Take nothing new from now on, and show the peers what is to be had."""
        ctx = self._ctx
        if not ctx.is_draining:
            ctx.is_draining = True
            self._until = ctx.tick + ctx.settings.handover_ticks
            ctx.changed("drains")
            self.tick()

    def tick(self) -> None:
        """Offer what is left, or push it back if the time is over or nobody is there to take it."""
        ctx = self._ctx
        if not ctx.is_draining or ctx.is_data_node:
            return
        peers = sorted(p for p, stage in ctx.view.known.items() if stage == ctx.stage)
        is_over = ctx.tick >= self._until or not peers
        for edge in list(ctx.table.ins.values()):
            if is_over or not edge.is_live or edge.out is None:
                self._push_back(edge)
        self._cancel_spare()
        chosen = ctx.rng.sample(peers, min(ctx.settings.num_same, len(peers)))
        for place, peer in enumerate(chosen):
            self._offer(peer, place)

    def _offer(self, peer: PeerId, place: int = 0) -> None:
        """Each peer is shown another unit first, so that they do not all reach for the same."""
        units = self._exchange.units()
        if units:
            place %= len(units)
            turned = (*units[place:], *units[:place])
            state = FlowState(units=turned, reach=(), num_free=0, is_leaving=True)
            self._ctx.send(peer, state)

    def on_token_end(self, taker: PeerId) -> None:
        """Whoever has just taken a flow may have room for another one."""
        if self._ctx.is_draining and self._ctx.view.known.get(taker) == self._ctx.stage:
            self._cancel_spare()
            self._offer(taker)

    def _push_back(self, edge: InEdge) -> None:
        ctx = self._ctx
        if not edge.token:
            ctx.table.drop_in(edge, ctx.tick)
            ctx.send(edge.peer, FlowRelease(pushed_back=(edge.edge_id,)))

    def _cancel_spare(self) -> None:
        ctx = self._ctx
        for edge in ctx.table.spare():
            if not edge.token:
                ctx.table.drop_out(edge, ctx.tick)
                ctx.send(edge.peer, FlowRelease(cancelled=(edge.edge_id,)))
