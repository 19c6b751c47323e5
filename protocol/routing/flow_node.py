"""A node of the flow router as a pure state machine: messages and ticks in, messages out.

"Go With The Flow" (arXiv 2509.21221): routes grow from the sinks backwards without a coordinator
and re-form when nodes come and go. The daemon and the simulator run this class.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.messages.routing import (
    FlowAnswer,
    FlowCheck,
    FlowCosts,
    FlowIntroduce,
    FlowLabels,
    FlowMeet,
    FlowOffers,
    FlowRelease,
    FlowRequest,
    FlowState,
    FlowWalk,
    TokenAsk,
    TokenEnd,
    TokenPrepare,
    TokenVote,
)
from protocol.routing.context import Context, Costs, Send
from protocol.routing.crossing import Crossing
from protocol.routing.exchange import Exchange
from protocol.routing.growth import Growth
from protocol.routing.handover import Handover
from protocol.routing.healing import Healing
from protocol.routing.labels import Cycle, Labels
from protocol.routing.settings import RoutingSettings
from protocol.routing.tables import FlowTable, InEdge, OutEdge
from protocol.routing.tokens import Tokens
from protocol.routing.view import View

__all__ = ["Costs", "FlowEdge", "FlowNode", "RoutingSettings", "Send"]

UNITS_PER_PEER = 4  # what a data node that looks for holders expects of each


@dataclass(frozen=True, slots=True)
class FlowEdge:
    """One unit of flow across one link."""

    peer: PeerId  # the other end
    target: PeerId  # the data node
    edge_id: int  # the same at both ends, chosen by the upstream end
    link_cost_s: float  # d_ij
    cost_to_sink_s: float  # from the downstream end on (0 at the sink)


class FlowNode:
    """Routes of one node. ``stage`` 0 is a data node: source and sink of ``demand`` flows."""

    def __init__(
        self,
        me: PeerId,
        *,
        stage: int,
        num_stages: int,
        capacity: int,
        demand: int = 0,
        costs: Costs,
        rng: random.Random,
        settings: RoutingSettings = RoutingSettings(),  # noqa: B008 (frozen)
    ) -> None:
        self._ctx = Context(
            me, stage, num_stages, capacity, demand, costs, rng, settings,
            FlowTable(is_relay=stage > 0), View(settings, rng), next_id=rng.randrange(2**40),
        )  # fmt: skip
        self._growth = Growth(self._ctx)
        self._healing = Healing(self._ctx)
        self._labels = Labels(self._ctx)
        self._tokens = Tokens(self._ctx, self._labels)
        self._exchange = Exchange(self._ctx, self._tokens)
        self._handover = Handover(self._ctx, self._exchange)
        self._crossing = Crossing(self._ctx, self._tokens)
        self._handle = self._handlers()
        self._improve_at = 0.0
        self._phase = rng.randrange(settings.refresh_ticks)

    # -- what happens to it

    def set_peers(self, stages: Mapping[PeerId, int], now: float) -> list[Send]:
        """All peers that are known with their stages; the bounded view is chosen from them."""
        ctx = self._begin(now)
        others = {peer: stage for peer, stage in stages.items() if peer != ctx.me}
        if others != ctx.view.known:
            for peer in [p for p in ctx.view.known if others.get(p) != ctx.view.known[p]]:
                self._lose(peer)
            self._redraw(others)
            self._growth.wake()
        return ctx.flush()

    def handle(self, sender: PeerId, message: Message, now: float) -> list[Send]:
        """Take a message of the router; any other is ignored, and so is a stranger's."""
        ctx = self._begin(now)
        handler = self._handle.get(type(message))
        if handler is not None and sender in ctx.view.known:
            handler(sender, message)
            if ctx.now >= self._improve_at:
                self._improve()
        return ctx.flush()

    def _handlers(self) -> dict[type[Message], Callable[[PeerId, Any], None]]:
        return {
            FlowIntroduce: self._on_introduce,
            FlowOffers: self._on_offers,
            FlowRequest: self._on_request,
            FlowAnswer: self._on_answer,
            FlowCosts: self._healing.on_costs,
            FlowRelease: self._on_release,
            FlowCheck: self._healing.on_check,
            FlowLabels: self._labels.on_labels,
            FlowState: self._exchange.on_state,
            FlowWalk: self._crossing.on_walk,
            FlowMeet: self._crossing.on_meet,
            TokenPrepare: self._tokens.on_prepare,
            TokenVote: self._tokens.on_vote,
            TokenEnd: self._on_token_end,
            TokenAsk: self._tokens.on_ask,
        }

    # What makes a route grow goes on at once, so that it grows in round trips and not in ticks.

    def _on_offers(self, sender: PeerId, message: FlowOffers) -> None:
        self._note_compute(sender, message.compute_s)
        self._growth.heard_offers(sender, message.offers)
        if message.offers:
            self._growth.ask()

    def _on_request(self, sender: PeerId, message: FlowRequest) -> None:
        self._growth.on_request(sender, message)
        self._healing.tell_costs(only_life=True)

    def _on_answer(self, sender: PeerId, message: FlowAnswer) -> None:
        self._growth.on_answer(sender, message)
        self._healing.tell_costs(only_life=True)
        self._growth.tell_offers()
        if message.refused:
            self._growth.ask()

    def _on_release(self, sender: PeerId, message: FlowRelease) -> None:
        self._healing.on_release(sender, message)
        self._growth.wake()
        self._growth.ask()

    def _on_token_end(self, sender: PeerId, message: TokenEnd) -> None:
        self._tokens.on_end(sender, message)
        if message.is_applied:
            self._handover.on_token_end(sender)

    def tick(self, now: float) -> list[Send]:
        """Do what is due every ``settings.tick_s``."""
        ctx = self._begin(now)
        ctx.tick += 1
        self._refresh()
        self._growth.drop_late()
        self._growth.give_back()
        self._handover.tick()
        if not ctx.is_data_node and ctx.rng.random() < 0.5 and ctx.table.improve_pairs():
            ctx.changed("paired its flows anew")
        self._growth.ask()
        self._tokens.tick()
        self._exchange.tick()
        self._crossing.tick()
        self._improve()
        self._healing.tell_costs()
        self._growth.tell_offers()
        self._healing.check()
        return ctx.flush()

    def lose(self, peer: PeerId, now: float) -> list[Send]:
        """``peer`` is gone: its flows are unpaired, orphans ask again, the rest is offered."""
        ctx = self._begin(now)
        self._lose(peer)
        self._growth.ask()
        self._healing.tell_costs(only_life=True)
        return ctx.flush()

    def drain(self, now: float) -> list[Send]:
        """Take nothing new and hand the flows over; in time, what nobody took is pushed back."""
        ctx = self._begin(now)
        self._handover.begin()
        return ctx.flush()

    def set_capacity(self, capacity: int, now: float) -> list[Send]:
        """Hold at most ``capacity`` units from now on; those over it are pushed back."""
        ctx = self._begin(now)
        ctx.capacity = capacity
        ins = sorted(ctx.table.ins.values(), key=lambda edge: edge.is_live)
        for edge in ins[: max(0, ctx.table.used - capacity)]:
            ctx.table.drop_in(edge, ctx.tick)
            ctx.send(edge.peer, self._push_back(edge))
        for outflow in ctx.table.spare()[: max(0, ctx.table.used - capacity)]:
            self._cancel(outflow)
        self._growth.wake()
        return ctx.flush()

    def set_demand(self, demand: int, now: float) -> list[Send]:
        """Want ``demand`` flows from now on (a data node)."""
        ctx = self._begin(now)
        ctx.demand = demand
        costly = sorted(ctx.table.outs.values(), key=lambda edge: -edge.cost_s)
        for edge in costly[: max(0, len(costly) - demand)]:
            self._cancel(edge)
        self._growth.wake()
        return ctx.flush()

    # -- what it says of itself

    @property
    def inflows(self) -> tuple[FlowEdge, ...]:
        """Units that arrive here."""
        return tuple(self._seen_in(edge) for edge in self._ctx.table.ins.values())

    @property
    def outflows(self) -> tuple[FlowEdge, ...]:
        """Units that leave here."""
        return tuple(_seen_out(edge) for edge in self._ctx.table.outs.values())

    def pairs(self) -> tuple[tuple[FlowEdge, FlowEdge], ...]:
        """Inflow and outflow of each unit that a relay passes on."""
        ins = self._ctx.table.ins.values()
        return tuple((self._seen_in(e), _seen_out(e.out)) for e in ins if e.out is not None)

    @property
    def demand(self) -> int:
        """How many flows it wants; 0 at a relay."""
        return self._ctx.demand

    @property
    def last_change(self) -> tuple[float, str] | None:
        """When its routes last changed, and why."""
        return self._ctx.last_change

    def _seen_in(self, edge: InEdge) -> FlowEdge:
        to_s = edge.out.cost_s if edge.out else 0.0
        return FlowEdge(edge.peer, edge.target, edge.edge_id, edge.link_s, to_s)

    # -- parts

    def _improve(self) -> None:
        """Renew the labels and tell them; begin a token for what they show.

        This goes on between ticks too, so that news of a change outruns tokens for old cycles.
        """
        ctx = self._ctx
        self._improve_at = ctx.now + ctx.settings.label_gap * ctx.settings.tick_s
        cycles = self._labels.compute()
        self._launch(cycles)
        self._labels.tell()
        self._growth.tell_waiting()

    def _launch(self, cycles: list[Cycle]) -> None:
        ctx = self._ctx
        if not self._tokens.is_idle():
            return
        for target in self._growth.stuck():
            walk = self._labels.augmenting(target)
            if walk is not None and not (cycles and ctx.rng.random() < 0.5):
                self._tokens.launch(walk, math.inf, "a flow found another way to its sink")
                return
        if cycles:
            self._tokens.launch(cycles[0], -ctx.settings.epsilon, "a cycle lowered the cost")

    def _begin(self, now: float) -> Context:
        self._ctx.now = now
        return self._ctx

    def _push_back(self, edge: InEdge) -> FlowRelease:
        return FlowRelease(pushed_back=(edge.edge_id,))

    def _cancel(self, edge: OutEdge) -> None:
        self._ctx.table.drop_out(edge, self._ctx.tick)
        self._ctx.send(edge.peer, FlowRelease(cancelled=(edge.edge_id,)))

    def _lose(self, peer: PeerId) -> None:
        ctx = self._ctx
        if ctx.table.drop_peer(peer, ctx.tick):
            ctx.changed(f"lost {peer}")
        ctx.pending = {e: p for e, p in ctx.pending.items() if p.peer != peer}
        ctx.view.forget(peer)
        self._labels.forget(peer)
        self._tokens.forget(peer)
        self._growth.wake()

    def _redraw(self, known: Mapping[PeerId, int]) -> None:
        ctx = self._ctx
        ctx.view.choose(known, ctx.stage, ctx.link_s)
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Draw the peers of the next stage anew, and let go of those that were there before."""
        ctx, before = self._ctx, list(self._ctx.view.next)
        keep = {edge.peer for edge in ctx.table.outs.values()}
        num_wanted = max(0, ctx.demand - len(ctx.table.outs)) // UNITS_PER_PEER
        ctx.view.look_ahead(ctx.stage, ctx.num_stages, ctx.link_s, keep, num_wanted)
        for peer in before:
            if peer not in ctx.view.next and peer in ctx.view.known:
                ctx.send(peer, self._introduction(wants_news=False))
        self._introduce()

    def _introduce(self) -> None:
        """Tell peers in view that I listen, a few at a time, those first that do not know it."""
        ctx = self._ctx
        limit = ctx.tick - ctx.settings.refresh_ticks
        due = [(peer, seen) for peer, seen in ctx.view.next.items() if seen.introduced <= limit]
        if len(due) > ctx.settings.audience:
            due.sort(key=lambda entry: entry[1].introduced)
        for peer, seen in due[: ctx.settings.audience]:
            seen.introduced = ctx.tick
            ctx.send(peer, self._introduction())

    def _introduction(self, *, wants_news: bool = True) -> FlowIntroduce:
        ctx = self._ctx
        return FlowIntroduce(
            stage=ctx.stage,
            compute_s=ctx.costs.compute_s(),
            capacity=ctx.capacity,
            wants_news=wants_news,
        )

    def _on_introduce(self, sender: PeerId, message: FlowIntroduce) -> None:
        ctx = self._ctx
        self._note_compute(sender, message.compute_s)
        is_new = sender not in ctx.view.subscribers
        if not message.wants_news:
            ctx.view.subscribers.pop(sender, None)
            return
        ctx.view.subscribers[sender] = ctx.tick
        if is_new:
            self._growth.greet(sender)
            self._labels.greet(sender)

    def _note_compute(self, peer: PeerId, compute_s: float) -> None:
        ctx = self._ctx
        if ctx.view.compute_of.get(peer) == compute_s:
            return
        ctx.view.compute_of[peer] = compute_s
        seen = ctx.view.next.get(peer)
        if seen is not None:
            seen.compute_s, seen.link_s = compute_s, ctx.link_s(peer)

    def _refresh(self) -> None:
        """Measure links again, drop silent subscribers, draw the view anew now and then."""
        ctx = self._ctx
        if ctx.tick % ctx.settings.redraw_ticks == 0:
            self._redraw(ctx.view.known)
        elif ctx.tick % ctx.settings.search_ticks == 0 and self._growth.stuck():
            self._look_ahead()
        else:
            self._introduce()
        if ctx.tick % ctx.settings.refresh_ticks == self._phase:
            for peer, seen in ctx.view.next.items():
                seen.link_s = ctx.link_s(peer)
            for edge in ctx.table.outs.values():
                edge.link_s = ctx.link_s(edge.peer)
            limit = ctx.tick - ctx.settings.forget_ticks
            ctx.view.subscribers = {p: t for p, t in ctx.view.subscribers.items() if t > limit}


def _seen_out(edge: OutEdge) -> FlowEdge:
    return FlowEdge(edge.peer, edge.target, edge.edge_id, edge.link_s, edge.to_s)
