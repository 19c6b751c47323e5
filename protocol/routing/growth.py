"""Routes grow from the sink backwards (spec 1.3): offers, requests with a quote, answers.

The last stage takes units of the sinks, which cost nothing, and offers each at its own cost to the
stage before; at the end the data node takes units of stage 1. What nobody takes is given back.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from protocol.keys import PeerId
from protocol.messages.routing import (
    MAX_OFFERS,
    MAX_SPARE,
    MOST_S,
    FlowAnswer,
    FlowOffers,
    FlowRelease,
    FlowRequest,
    Offers,
)
from protocol.routing.context import Context, Pending
from protocol.routing.news import News
from protocol.routing.tables import InEdge, OutEdge

Asked = dict[tuple[PeerId, PeerId], list[tuple[int, float, float | None]]]


class Growth:
    """Asks for outflows where they are cheapest, and grants its own spare ones."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._told: Offers | None = None
        self._told_at = 0
        self._news = News[None]()
        self._backoff = 0
        self._hungry_at = 0

    # -- offers

    def offers(self) -> Offers:
        """Spare units and their prices, for each data node."""
        ctx, prices = self._ctx, defaultdict[PeerId, list[float]](list)
        if ctx.is_draining:
            return ()
        if ctx.is_data_node:
            prices[ctx.me] = [0.0] * min(MAX_SPARE, self._sink_room())
        else:
            for edge in ctx.table.spare():
                if not edge.token:
                    prices[edge.target].append(edge.cost_s)
        return tuple(
            (target, tuple(sorted(costs)[:MAX_SPARE]))
            for target, costs in sorted(prices.items())[:MAX_OFFERS]
            if costs
        )

    def _sink_room(self) -> int:
        """A sink offers twice what it wants, so that poor nodes cannot squat on all of it."""
        ctx = self._ctx
        live = sum(edge.is_live for edge in ctx.table.ins.values())
        if live >= ctx.demand:
            return 0
        return max(0, int(ctx.settings.sink_surplus * ctx.demand) - len(ctx.table.ins))

    def tell_offers(self) -> None:
        """Send the offers to the subscribers if they changed."""
        ctx, offers = self._ctx, self.offers()
        age = ctx.tick - self._told_at
        if offers != self._told or (offers and age >= ctx.settings.refresh_ticks):
            self._told, self._told_at = offers, ctx.tick
            self._news.add(ctx.view.subscribers, ())
        self.tell_waiting()

    def tell_waiting(self) -> None:
        """Send the offers to subscribers that have not heard of the last change."""
        ctx = self._ctx
        if self._news:
            message = self.offers_message()
            for peer, _, _ in self._news.take(ctx.view.subscribers, ctx.settings.audience):
                ctx.send(peer, message)

    def greet(self, peer: PeerId) -> None:
        """Tell a new subscriber what is to be had."""
        self._news.told(peer)
        self._ctx.send(peer, self.offers_message())

    def offers_message(self) -> FlowOffers:
        """What a subscriber is told."""
        ctx = self._ctx
        return FlowOffers(stage=ctx.stage, compute_s=ctx.costs.compute_s(), offers=self.offers())

    def heard_offers(self, sender: PeerId, offers: Offers) -> None:
        """Fresh prices of a peer of the next stage."""
        seen = self._ctx.view.next.get(sender)
        if seen is not None:
            known = [offer for offer in offers if self._ctx.is_sink(offer[0])]
            seen.offers = {target: list(prices) for target, prices in known}

    # -- requests

    def ask(self) -> None:
        """Request an outflow for each orphan, then for the room that is left."""
        asked: Asked = defaultdict(list)
        for target, from_s in self._wants():
            best = self._cheapest(target)
            if best is None:
                if target is None:
                    break
                continue
            peer, found = best
            self._request(asked, peer, found, from_s)
        for (peer, target), edges in asked.items():
            link_s = self._ctx.pending[edges[0][0]].link_s
            self._ctx.send(peer, FlowRequest(target=target, link_cost_s=link_s, edges=tuple(edges)))

    def _wants(self) -> Iterator[tuple[PeerId | None, float | None]]:
        """Targets to ask for (None: any), with the cost from the source of the flow that waits."""
        ctx = self._ctx
        pending = Counter(p.target for p in ctx.pending.values())
        if ctx.is_draining:
            return
        if ctx.is_data_node:
            for _ in range(ctx.demand - len(ctx.table.outs) - len(ctx.pending)):
                yield ctx.me, 0.0
            return
        orphans = sorted(ctx.table.orphans(), key=lambda edge: edge.from_s)
        for edge in orphans:
            if pending[edge.target] > 0:
                pending[edge.target] -= 1
            else:
                yield edge.target, edge.from_s if edge.is_live else None
        if ctx.tick >= self._hungry_at:
            for _ in range(ctx.room()):
                yield None, None

    def _cheapest(self, target: PeerId | None) -> tuple[PeerId, PeerId] | None:
        """The peer whose offer plus link is cheapest, and the data node that the offer leads to."""
        peers = self._ctx.view.next
        if target is None:
            targets = sorted({t for seen in peers.values() for t, p in seen.offers.items() if p})
            if not targets:
                return None
            target = self._ctx.rng.choice(targets)
        best, found = math.inf, None
        for peer, seen in peers.items():
            prices = seen.offers.get(target)
            if prices and seen.link_s + prices[0] < best:
                best, found = seen.link_s + prices[0], peer
        return None if found is None else (found, target)

    def _request(self, asked: Asked, peer: PeerId, target: PeerId, from_s: float | None) -> None:
        ctx, seen = self._ctx, self._ctx.view.next[peer]
        if len(asked[peer, target]) >= MAX_SPARE:
            return
        quote, edge_id = seen.offers[target].pop(0), ctx.new_id()
        cost = None if from_s is None else min(MOST_S, from_s + seen.link_s)
        asked[peer, target].append((edge_id, quote, cost))
        ctx.pending[edge_id] = Pending(peer, target, seen.link_s, ctx.tick)

    def stuck(self) -> list[PeerId]:
        """Targets of flows that wait for an outflow while nobody in view offers one."""
        ctx, waits = self._ctx, dict[PeerId, None]()
        if ctx.is_data_node:
            if len(ctx.table.outs) + len(ctx.pending) + ctx.reserved < ctx.demand:
                waits[ctx.me] = None
        else:
            asked = {pending.target for pending in ctx.pending.values()}
            waits |= dict.fromkeys(e.target for e in ctx.table.orphans() if e.is_live)
            waits = {t: None for t in waits if t not in asked}
        return [t for t in waits if self._cheapest(t) is None]

    def drop_late(self) -> None:
        """Give up requests that nobody answered; should the answer come yet, it is cancelled."""
        ctx = self._ctx
        limit = ctx.tick - ctx.settings.request_ticks
        for edge_id in [e for e, p in ctx.pending.items() if p.sent <= limit]:
            peer = ctx.pending.pop(edge_id).peer
            ctx.send(peer, FlowRelease(cancelled=(edge_id,)))

    # -- answers

    def on_request(self, sender: PeerId, request: FlowRequest) -> None:
        """Grant each edge whose quote covers the cost of a spare unit."""
        ctx, target = self._ctx, request.target
        accepted, refused = [], []
        for edge_id, quote, from_s in request.edges:
            known = ctx.table.ins.get((sender, edge_id))
            if known is None:
                known = self._grant(sender, request, edge_id, quote, from_s)
            if known is None:
                refused.append(edge_id)
            else:
                known.told_s = known.out.cost_s if known.out else 0.0
                accepted.append((edge_id, known.told_s))
        ctx.send(
            sender,
            FlowAnswer(
                target=target,
                accepted=tuple(accepted),
                refused=tuple(refused),
                offers=self.offers(),
            ),
        )

    def _grant(
        self, sender: PeerId, request: FlowRequest, edge_id: int, quote: float, from_s: float | None
    ) -> InEdge | None:
        ctx = self._ctx
        if ctx.view.known.get(sender) != (ctx.stage - 1) % (ctx.num_stages + 1):
            return None
        if not self._has_unit(request.target, quote):
            return None
        cost = math.inf if from_s is None else from_s
        edge = InEdge(sender, edge_id, request.target, request.link_cost_s, cost, ctx.tick)
        ctx.table.add_in(edge, ctx.tick)
        return edge

    def _has_unit(self, target: PeerId, quote: float) -> bool:
        ctx = self._ctx
        if ctx.is_draining:
            return False
        if ctx.is_data_node:
            return target == ctx.me and self._sink_room() > 0
        return any(
            edge.target == target and edge.cost_s <= quote + 1e-6 and not edge.token
            for edge in ctx.table.spare()
        )

    def on_answer(self, sender: PeerId, answer: FlowAnswer) -> None:
        """Take what was granted; a unit that is no longer wanted is cancelled."""
        ctx, unwanted = self._ctx, []
        for edge_id, to_s in answer.accepted:
            asked = ctx.pending.get(edge_id)
            if asked is None or asked.peer != sender:
                if edge_id not in ctx.table.outs:
                    unwanted.append(edge_id)
                continue
            del ctx.pending[edge_id]
            if not self._has_place(asked.target):
                unwanted.append(edge_id)
                continue
            edge = OutEdge(sender, edge_id, asked.target, asked.link_s, to_s, ctx.tick)
            ctx.table.add_out(edge, ctx.tick)
        for edge_id in answer.refused:
            if edge_id in ctx.pending and ctx.pending[edge_id].peer == sender:
                del ctx.pending[edge_id]
        if unwanted:
            ctx.send(sender, FlowRelease(cancelled=tuple(unwanted)))
        self.heard_offers(sender, answer.offers)

    def _has_place(self, target: PeerId) -> bool:
        """Whether an outflow fits: the inflow that it was for may be gone, and its place taken."""
        ctx = self._ctx
        if ctx.is_data_node or ctx.table.used < ctx.capacity:
            return True
        return any(edge.target == target for edge in ctx.table.orphans())

    # -- giving back

    def give_back(self) -> None:
        """Push back orphans that find no outflow, cancel outflows that nobody takes."""
        ctx, s = self._ctx, self._ctx.settings
        for inflow in ctx.table.orphans():
            patience = s.orphan_ticks if inflow.is_live else 2
            if ctx.tick - inflow.unpaired_since > patience and not inflow.token:
                ctx.table.drop_in(inflow, ctx.tick)
                ctx.send(inflow.peer, FlowRelease(pushed_back=(inflow.edge_id,)))
                ctx.changed("pushed back a flow that found no way on")
        for outflow in ctx.table.spare():
            idle = ctx.tick - outflow.unpaired_since
            if idle > s.idle_ticks and not outflow.token and ctx.rng.random() < 0.3:
                ctx.table.drop_out(outflow, ctx.tick)
                ctx.send(outflow.peer, FlowRelease(cancelled=(outflow.edge_id,)))
                self._rest()
        if ctx.is_data_node:
            self._dissolve_surplus()

    def _dissolve_surplus(self) -> None:
        """A sink that has what it wants ends the routes that never reached their source."""
        ctx = self._ctx
        ins = list(ctx.table.ins.values())
        if sum(edge.is_live for edge in ins) < ctx.demand:
            return
        for edge in ins:
            if not edge.is_live and ctx.tick - edge.born > 3 and not edge.token:
                ctx.table.drop_in(edge, ctx.tick)
                ctx.send(edge.peer, FlowRelease(pushed_back=(edge.edge_id,)))

    def _rest(self) -> None:
        """Nobody wants what is offered here: ask less and less often."""
        ctx = self._ctx
        self._backoff = min(ctx.settings.max_backoff_ticks, max(4, 2 * self._backoff))
        self._hungry_at = ctx.tick + ctx.rng.randint(self._backoff // 2, self._backoff)

    def wake(self) -> None:
        """Something changed: ask again at once."""
        self._backoff = 0
        self._hungry_at = self._ctx.tick
