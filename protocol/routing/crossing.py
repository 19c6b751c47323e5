"""Crossings: two flows of different data nodes change places on part of the way.

Labels and exchanges move the flows of one data node around those of all others; what pays only if
flows of two data nodes move together they cannot see. So data nodes tell each other some of their
flows, each as the list of its links, and let walks go along their own flows, q. A walk notes the
links of q and prices, at each of them, what it would cost if q and another data node's flow p
crossed there:

    p_i -> p_i+1, q_i -> q_i+1    become    p_i -> q_i+1, q_i -> p_i+1

Two crossings bring each flow back to its own data node, and nobody carries more than before. The
two that lower the cost most become a token. While a temperature lasts, so do now and then the two
that raise it least, by the Metropolis rule: this leads out of most dead ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from protocol.keys import PeerId
from protocol.messages.routing import MAX_HOPS, MAX_MET, Change, FlowMeet, FlowWalk, Leg
from protocol.routing.context import Context
from protocol.routing.labels import Cycle
from protocol.routing.tables import OutEdge
from protocol.routing.tokens import Tokens

Legs = tuple[Leg, ...]
Price = float | None  # None: one of the new links is unknown to who would use it
Prices = tuple[tuple[Price, ...], ...]  # for each flow that is compared, of each leg
WHY = "crossed a flow of another data node"
_LEAST_S = 1e-7  # what differs by less is the same
_MOST_S = 1e8  # far from what a message may carry
_CHANGES_PER_LEG = 4  # each of two flows gives up one link and takes one


class Crossing:
    """Begins walks at a data node, passes them on at a relay, begins a token for what they show."""

    def __init__(self, ctx: Context, tokens: Tokens) -> None:
        self._ctx = ctx
        self._tokens = tokens
        self._noted: dict[int, Legs] = {}  # own flows, by their first edge
        self._met: tuple[Legs, ...] = ()  # what another data node told last
        self._heat = ctx.settings.crossing_heat

    def tick(self) -> None:
        """Let walks go along some of this data node's flows; tell another data node some flows."""
        ctx = self._ctx
        others = sorted(p for p, stage in ctx.view.known.items() if stage == 0)
        if not ctx.is_data_node or not others:
            return
        self._heat *= ctx.settings.crossing_cooling_per_tick
        for edge in ctx.table.outs.values():
            if ctx.rng.random() < ctx.settings.crossing_chance:
                self._walk_on(edge, (), self._met, ((),) * len(self._met))
        self._noted = {e: legs for e, legs in self._noted.items() if e in ctx.table.outs}
        if self._noted:
            flows = ctx.rng.sample(list(self._noted.values()), min(MAX_MET, len(self._noted)))
            ctx.send(ctx.rng.choice(others), FlowMeet(flows=tuple(flows)))

    def on_meet(self, sender: PeerId, meet: FlowMeet) -> None:
        """Keep another data node's flows for the next walks."""
        ctx, whole = self._ctx, self._ctx.num_stages + 1
        are_whole = all(len(legs) == whole and legs[-1][0] == sender for legs in meet.flows)
        if ctx.is_data_node and ctx.view.known[sender] == 0 and are_whole:
            self._met = meet.flows

    def on_walk(self, sender: PeerId, walk: FlowWalk) -> None:
        """Pass a walk on along its flow; at home, note the flow and act on what it shows."""
        ctx = self._ctx
        edge = ctx.table.ins.get((sender, walk.edge_id))
        if edge is None or not self._is_sound(walk):
            return
        prices = self._with_upstream(walk)
        if ctx.is_data_node:
            self._noted[walk.legs[0][1]] = walk.legs
            self._cross(walk, prices)
        elif edge.out is not None:
            self._walk_on(edge.out, walk.legs, walk.met, prices)

    def _is_sound(self, walk: FlowWalk) -> bool:
        """Whether it has as many legs as it should here, and a price of each of them."""
        ctx, num = self._ctx, len(walk.legs)
        whole = ctx.num_stages + 1
        return (
            num == (ctx.stage or whole)
            and walk.legs[-1][:2] == (ctx.me, walk.edge_id)
            and len(walk.met) == len(walk.prices)
            and all(len(legs) == whole for legs in walk.met)
            and all(len(prices) == num for prices in walk.prices)
        )

    def _walk_on(self, edge: OutEdge, legs: Legs, met: tuple[Legs, ...], prices: Prices) -> None:
        """Go along ``edge``; of each crossing's two new links, price the one that starts here."""
        place = len(legs)
        prices = tuple(
            (*row, self._with(-p[place][2] - edge.link_s, p[place][0]))
            for p, row in zip(met, prices, strict=True)
        )
        legs = (*legs, (edge.peer, edge.edge_id, edge.link_s))
        walk = FlowWalk(edge_id=edge.edge_id, legs=legs, met=met, prices=prices)
        self._ctx.send(edge.peer, walk)

    def _with_upstream(self, walk: FlowWalk) -> Prices:
        """Add to each last crossing the new link that ends here."""
        up = len(walk.legs) - 2  # -1: the last leg ends where the first one starts
        return tuple(
            (*row[:-1], self._with(row[-1], p[up][0]))
            for p, row in zip(walk.met, walk.prices, strict=True)
        )

    def _with(self, price: Price, peer: PeerId) -> Price:
        """``price`` and what the link to or from ``peer`` costs, if that is known here."""
        view = self._ctx.view
        if price is None or peer not in view.known or peer not in view.compute_of:
            return None
        price += self._ctx.link_s(peer)
        return price if abs(price) < _MOST_S else None

    def _cross(self, walk: FlowWalk, prices: Prices) -> None:
        found = min(self._pairs(prices), default=None)
        if found is None or not self._tokens.is_idle() or not self._takes(found[0], walk.legs):
            return
        delta, k, first, last = found
        cycle = Cycle(delta, crossed(walk.met[k], walk.legs, first, last))
        limit_s = -self._ctx.settings.epsilon if delta < 0 else delta + _LEAST_S
        self._tokens.launch(cycle, limit_s, WHY)
        self._met = ()  # what it says of this flow will be wrong, or is already

    def _takes(self, delta: float, legs: Legs) -> bool:
        """Whether to cross: if it raises the cost, with probability exp(-delta / T)."""
        if delta < 0 or self._heat <= 0.01 * self._ctx.settings.crossing_heat:
            return delta < 0
        heat_s = self._heat * sum(leg[2] for leg in legs) / len(legs)
        return heat_s > 0 and self._ctx.rng.random() < math.exp(-delta / heat_s)

    def _pairs(self, prices: Prices) -> Iterator[tuple[float, int, int, int]]:
        """What two crossings cost, with which flow, and on which legs."""
        most = MAX_HOPS // _CHANGES_PER_LEG
        for k, row in enumerate(prices):
            known = [(i, price) for i, price in enumerate(row) if price is not None]
            for (i, one), (j, two) in combinations(known, 2):
                if j - i < most and abs(one + two) > _LEAST_S:
                    yield one + two, k, i, j


def crossed(p: Legs, q: Legs, first: int, last: int) -> tuple[Change, ...]:
    """What changes if p and q take each other's way from the end of leg ``first`` to ``last``."""
    gone, new = list[Change](), list[Change]()
    for one, other in ((p, q), (q, p)):
        target = one[-1][0]
        for i in range(first, last + 1):
            up = one if i == first else other
            down = one if i == last else other
            gone.append((False, one[i - 1][0], one[i][0], target, one[i][1]))
            new.append((True, up[i - 1][0], down[i][0], target, 0))
    # where both flows use a node or link already, some of it stays
    for change in list(new):
        same = next((g for g in gone if g[1:4] == change[1:4]), None)
        if same is not None:
            gone.remove(same)
            new.remove(change)
    return (*gone, *new)
