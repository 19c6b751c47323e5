"""Exchanges between two nodes of one stage, with annealing (spec 1.3).

A node tells a peer of its stage which units it passes on. The peer looks for what lowers the cost
of both together, and changes it by a token:

    CHANGE    a->x, b->y  become  a->y, b->x             (one target)
    REDIRECT  p->a->x     becomes p->b->x                (b has room)
    SWAP      p->a->x, q->b->y  become  p->b->x, q->a->y (two targets; labels cannot see this)

While the temperature lasts it also takes a random one with probability exp(-delta / T): this comes
before the labels have reached far. The temperature falls with every exchange and with time, so that
the labels have the last word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from protocol.keys import PeerId
from protocol.messages.routing import MAX_UNITS, Change, FlowState, Unit
from protocol.routing.context import Context
from protocol.routing.labels import Cycle
from protocol.routing.tables import InEdge, OutEdge
from protocol.routing.tokens import Tokens

Found = tuple[float, str, tuple[Change, ...]]


class Exchange:
    """Looks for exchanges with peers of the own stage."""

    def __init__(self, ctx: Context, tokens: Tokens) -> None:
        self._ctx = ctx
        self._tokens = tokens
        self._temperature: float | None = None
        self._barred: dict[PeerId, int] = {}

    def tick(self) -> None:
        """Cool down; now and then show a peer of the stage what flows here."""
        ctx, s = self._ctx, self._ctx.settings
        if self._temperature is not None:
            self._temperature *= s.cooling_per_tick
        peers = [p for p in ctx.view.same if self._barred.get(p, 0) <= ctx.tick]
        if ctx.is_data_node or not peers or ctx.rng.random() >= s.exchange_chance:
            return
        if ctx.is_draining:
            return
        units = self.units()
        if units or ctx.room() > 0:
            state = FlowState(units=units, reach=self._reach(), num_free=max(0, ctx.room()))
            ctx.send(ctx.rng.choice(peers), state)

    def units(self) -> tuple[Unit, ...]:
        """The units that are passed on here and that no token holds."""
        pairs = [(e, e.out) for e in self._ctx.table.ins.values() if e.is_live and e.out]
        return tuple(_unit(i, o) for i, o in pairs if not i.token and not o.token)[:MAX_UNITS]

    def _reach(self) -> tuple[tuple[PeerId, float], ...]:
        seen = self._ctx.view.next.items()
        return tuple((peer, s.link_s) for peer, s in seen)[:MAX_UNITS]

    def on_state(self, sender: PeerId, state: FlowState) -> None:
        """Begin the best exchange with ``sender``, if one is worth it."""
        ctx = self._ctx
        if ctx.view.known.get(sender) != ctx.stage or ctx.is_draining:
            return
        if state.is_leaving:
            self._take_over(sender, state.units)
            return
        if not self._tokens.is_idle():
            return
        found = [f for f in self._exchanges(sender, state) if math.isfinite(f[0])]
        self._barred[sender] = ctx.tick + ctx.settings.bar_ticks
        if not found:
            return
        best = min(found)
        if best[0] < -ctx.settings.epsilon:
            self._tokens.launch(Cycle(best[0], best[2]), -ctx.settings.epsilon, best[1])
        else:
            self._anneal(ctx.rng.choice(found))

    def _take_over(self, giver: PeerId, units: tuple[Unit, ...]) -> None:
        """Carry a unit of a peer that leaves, if there is room: nobody else may have any."""
        ctx, known = self._ctx, self._ctx.view.known
        if self._tokens.is_leading or ctx.firm(is_growing=False) >= ctx.capacity:
            return
        unit = next((u for u in units if u[1] in known and u[4] in known), None)
        if unit is not None:
            cycle = Cycle(0.0, _moved(unit, giver, ctx.me))
            self._tokens.launch(cycle, math.inf, "took over a flow of a peer that leaves")

    def _anneal(self, found: Found) -> None:
        """Metropolis: take a worse one with probability exp(-delta / T)."""
        heat = self._heat()
        if heat > 0 and self._ctx.rng.random() < math.exp(-found[0] / heat):
            self._temperature = heat * self._ctx.settings.cooling
            self._tokens.launch(Cycle(found[0], found[2]), found[0] + 1e-9, found[1])

    def _heat(self) -> float:
        s = self._ctx.settings
        links = [edge.link_s for edge in self._ctx.table.outs.values()]
        start = s.heat * sum(links) / len(links) if links else 0.0
        if self._temperature is None:
            self._temperature = start
        return self._temperature if self._temperature > 0.01 * start else 0.0

    def _exchanges(self, peer: PeerId, state: FlowState) -> Iterator[Found]:
        mine, theirs, reach = self.units(), state.units, dict(state.reach)
        me, room = self._ctx.me, self._ctx.room()
        for unit in theirs if room > 0 else ():
            yield self._redirect(unit, peer, me, self._link(unit[1]), self._to(unit[4]))
        for unit in mine if state.num_free > 0 else ():
            # the peer's link to my predecessor is not known here: assume that it costs the same
            yield self._redirect(unit, me, peer, unit[3], reach.get(unit[4], math.inf))
        for a in theirs:
            for b in mine:
                if a[0] == b[0]:
                    yield self._change(a, b, peer, reach)
                else:
                    yield self._swap(a, b, peer, reach)

    def _link(self, peer: PeerId) -> float:
        return self._ctx.link_s(peer) if peer in self._ctx.view.known else math.inf

    def _to(self, peer: PeerId) -> float:
        seen = self._ctx.view.next.get(peer)
        return math.inf if seen is None else seen.link_s

    def _redirect(
        self, unit: Unit, giver: PeerId, taker: PeerId, link_in: float, link_out: float
    ) -> Found:
        delta = link_in + link_out - unit[3] - unit[6]
        return delta, "redirected a flow inside its stage", _moved(unit, giver, taker)

    def _change(self, a: Unit, b: Unit, peer: PeerId, reach: dict[PeerId, float]) -> Found:
        """Units a (of ``peer``) and b (mine) swap next hops."""
        if a[4] == b[4]:
            return math.inf, "", ()
        delta = reach.get(b[4], math.inf) + self._to(a[4]) - a[6] - b[6]
        me, target = self._ctx.me, a[0]
        changes: tuple[Change, ...] = (
            (False, peer, a[4], target, a[5]),
            (False, me, b[4], target, b[5]),
            (True, peer, b[4], target, 0),
            (True, me, a[4], target, 0),
        )
        return delta, "changed next hops with a peer of its stage", changes

    def _swap(self, a: Unit, b: Unit, peer: PeerId, reach: dict[PeerId, float]) -> Found:
        """Units of two targets swap their holders; what my predecessor pays is only guessed."""
        delta = self._link(a[1]) + self._to(a[4]) + reach.get(b[4], math.inf) - a[6] - b[6] - a[3]
        changes = _moved(a, peer, self._ctx.me) + _moved(b, self._ctx.me, peer)
        return delta, "swapped two flows inside its stage", changes


def _unit(into: InEdge, out: OutEdge) -> Unit:
    return (
        into.target, into.peer, into.edge_id, into.link_s, out.peer, out.edge_id, out.link_s,
    )  # fmt: skip


def _moved(unit: Unit, giver: PeerId, taker: PeerId) -> tuple[Change, ...]:
    target, before, id_in, _, after, id_out, _ = unit
    return (
        (False, before, giver, target, id_in),
        (False, giver, after, target, id_out),
        (True, before, taker, target, 0),
        (True, taker, after, target, 0),
    )
