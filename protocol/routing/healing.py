"""What keeps both ends of every edge of one mind: costs that travel, releases, anti-entropy."""

from __future__ import annotations

import math
from collections import defaultdict

from protocol.keys import PeerId
from protocol.messages.routing import MAX_EDGES, MOST_S, FlowCheck, FlowCosts, FlowRelease
from protocol.routing.context import Context
from protocol.routing.tables import InEdge, OutEdge

Told = tuple[
    defaultdict[PeerId, list[tuple[int, float]]],
    defaultdict[PeerId, list[tuple[int, float | None, float]]],
]


class Healing:
    """Relabels edges whose cost changed and mends edges that only one end knows."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._phase = ctx.rng.randrange(ctx.settings.check_ticks)

    # -- costs: to the sink they travel upstream, from the source downstream (invariant 5)

    def tell_costs(self, *, only_life: bool = False) -> None:
        """Tell the other ends what changed; with ``only_life``, only which flows came to life."""
        told: Told = (defaultdict(list), defaultdict(list))
        for edge in self._ctx.table.outs.values():
            self._tell_down(edge, told, only_life=only_life)
        if not only_life and not self._ctx.is_data_node:
            for inflow in self._ctx.table.ins.values():
                self._tell_up(inflow, told)
        for peer in {**told[0], **told[1]}:
            self._ctx.send(
                peer,
                FlowCosts(
                    to_sink=tuple(told[0].get(peer, ())[:MAX_EDGES]),
                    from_source=tuple(told[1].get(peer, ())[:MAX_EDGES]),
                ),
            )

    def _from_source(self, edge: OutEdge) -> float:
        if self._ctx.is_data_node:
            return 0.0
        return math.inf if edge.into is None else edge.into.from_s

    def _told_down(self, edge: OutEdge) -> float:
        """Cost from the source to the other end of ``edge``; infinite if there is no source yet."""
        from_s = self._from_source(edge)
        return min(MOST_S, from_s + edge.link_s) if from_s < math.inf else from_s

    def _tell_down(self, edge: OutEdge, told: Told, *, only_life: bool) -> None:
        cost = self._told_down(edge)
        if cost == edge.told_s or (only_life and math.isinf(cost) == math.isinf(edge.told_s)):
            return
        if edge.told_s == -1.0 and math.isinf(cost):
            return
        edge.told_s = cost
        told[1][edge.peer].append((edge.edge_id, cost if cost < math.inf else None, edge.link_s))

    def _tell_up(self, edge: InEdge, told: Told) -> None:
        if edge.out is not None and edge.out.cost_s != edge.told_s:
            edge.told_s = edge.out.cost_s
            told[0][edge.peer].append((edge.edge_id, edge.told_s))

    def on_costs(self, sender: PeerId, costs: FlowCosts | FlowCheck) -> None:
        """Relabel; news of life goes on at once, mere numbers with the next tick."""
        table = self._ctx.table
        for edge_id, to_s in costs.to_sink:
            outflow = table.outs.get(edge_id)
            if outflow is not None and outflow.peer == sender:
                outflow.to_s = to_s
        for edge_id, from_s, link_s in costs.from_source:
            inflow = table.ins.get((sender, edge_id))
            if inflow is not None:
                if from_s is None and inflow.is_live:
                    inflow.dead_since = self._ctx.tick
                inflow.from_s = math.inf if from_s is None else from_s
                inflow.link_s = link_s
        if not self._ctx.is_data_node:
            self.tell_costs(only_life=True)

    # -- releases

    def on_release(self, sender: PeerId, release: FlowRelease) -> None:
        """The other end let go of these edges."""
        ctx = self._ctx
        for edge_id in release.cancelled:
            inflow = ctx.table.ins.get((sender, edge_id))
            if inflow is not None:
                ctx.table.drop_in(inflow, ctx.tick)
        for edge_id in release.pushed_back:
            outflow = ctx.table.outs.get(edge_id)
            if outflow is not None and outflow.peer == sender:
                ctx.table.drop_out(outflow, ctx.tick)
                ctx.changed("the next hop pushed a flow back")
        self.tell_costs(only_life=True)

    # -- anti-entropy

    def check(self) -> None:
        """Now and then list to each partner the edges that I believe we share."""
        ctx = self._ctx
        if ctx.tick % ctx.settings.check_ticks != self._phase:
            return
        told: Told = (defaultdict(list), defaultdict(list))
        for edge in ctx.table.outs.values():
            cost = self._told_down(edge)
            known = cost if cost < math.inf else None
            told[1][edge.peer].append((edge.edge_id, known, edge.link_s))
        for inflow in ctx.table.ins.values():
            told[0][inflow.peer].append((inflow.edge_id, max(0.0, inflow.told_s)))
        for peer in {**told[0], **told[1]}:
            ctx.send(
                peer,
                FlowCheck(
                    to_sink=tuple(told[0].get(peer, ())[:MAX_EDGES]),
                    from_source=tuple(told[1].get(peer, ())[:MAX_EDGES]),
                ),
            )

    def on_check(self, sender: PeerId, check: FlowCheck) -> None:
        """Release what only the sender knows, drop what only I know; young edges are spared."""
        ctx = self._ctx
        theirs = {known[0] for known in check.from_source}
        mine = {known[0] for known in check.to_sink}
        back = tuple(sorted(e for e in theirs if (sender, e) not in ctx.table.ins))
        gone = tuple(sorted(e for e in mine if not self._is_mine(sender, e)))
        # while a token's end is awaited, what is unknown here may be what it adds
        if (back or gone) and not ctx.num_held:
            ctx.send(sender, FlowRelease(cancelled=gone, pushed_back=back))
        limit = ctx.tick - ctx.settings.grace_ticks
        for inflow in [e for e in ctx.table.ins.values() if e.peer == sender]:
            if inflow.edge_id not in theirs and inflow.born <= limit and not inflow.token:
                ctx.table.drop_in(inflow, ctx.tick)
        for outflow in [e for e in ctx.table.outs.values() if e.peer == sender]:
            if outflow.edge_id not in mine and outflow.born <= limit and not outflow.token:
                ctx.table.drop_out(outflow, ctx.tick)
                ctx.changed("the next hop no longer knew a flow")
        self.on_costs(sender, check)

    def _is_mine(self, sender: PeerId, edge_id: int) -> bool:
        edge = self._ctx.table.outs.get(edge_id)
        return (edge is not None and edge.peer == sender) or edge_id in self._ctx.pending
