"""Tokens: how several nodes change their edges together (spec 1.3), in two phases.

Whoever found a cycle asks everyone whose edges it touches to lock them, to set room aside, and to
say what each change costs now; only if the sum is still negative it lets them apply it. Locks end
with the initiator's word or with time. Should a word be lost for good, the two ends of some edge
disagree; the check (``healing``) then releases it and its flow searches again.

The spec passes the token from hop to hop. Here the initiator asks all at once: locks are held for
two round trips instead of two turns around the cycle, and a node that is touched twice is asked
once, about the sum of its changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from protocol.keys import PeerId
from protocol.messages.routing import (
    MAX_HOPS,
    Change,
    FlowRelease,
    TokenAsk,
    TokenEnd,
    TokenPrepare,
    TokenVote,
)
from protocol.routing.context import Context
from protocol.routing.labels import Cycle, Labels
from protocol.routing.tables import InEdge, OutEdge

# Far more than come up by themselves: tokens whose end is awaited, units that arrive at a sink.
MAX_HELD = 1024
_MOST_AT_SINK = 64
Priced = tuple[int, int, float]  # index of a change, edge id, cost


@dataclass(slots=True)
class Led:
    """A token that this node began."""

    token: int
    changes: tuple[Change, ...]
    waiting: set[PeerId]
    limit_s: float  # apply only below this
    begun: int
    why: str
    priced: list[Priced] = field(default_factory=list)
    verdict: TokenEnd | None = None


@dataclass(slots=True)
class Held:
    """A token that holds edges or room of this node."""

    token: int
    initiator: PeerId
    changes: tuple[Change, ...]
    reserved: int
    since: int
    new_ids: dict[int, int]


class Tokens:
    """Leads tokens of its own, one at a time, and takes part in those of others."""

    def __init__(self, ctx: Context, labels: Labels) -> None:
        self._ctx = ctx
        self._labels = labels
        self._led: dict[int, Led] = {}
        self._held: dict[int, Held] = {}
        self._rest_until = 0.0
        self.num_applied = 0
        self.num_aborted = 0

    # -- initiator

    @property
    def is_leading(self) -> bool:
        """Whether a token of its own is under way."""
        return any(led.verdict is None for led in self._led.values())

    def is_idle(self) -> bool:
        """Whether it may begin another token."""
        return not self.is_leading and self._ctx.now >= self._rest_until

    def launch(self, cycle: Cycle, limit_s: float, why: str) -> None:
        """Ask everyone whom ``cycle`` touches; this node too."""
        ctx = self._ctx
        if not 0 < len(cycle.changes) <= MAX_HOPS:
            return  # by what others told of their flows: no change at all, or too large a one
        token = ctx.rng.randrange(1, 2**53)
        peers = {c[1] for c in cycle.changes} | {c[2] for c in cycle.changes}
        led = Led(token, cycle.changes, peers, limit_s, ctx.tick, why)
        self._led[token] = led
        message = TokenPrepare(token=token, changes=cycle.changes)
        if ctx.me in peers:
            self._count(led, ctx.me, self._vote(ctx.me, message))
        if led.verdict is None:
            for peer in sorted(peers - {ctx.me}):
                ctx.send(peer, message)

    def on_vote(self, sender: PeerId, vote: TokenVote) -> None:
        """Count a vote; the last one decides."""
        led = self._led.get(vote.token)
        if led is not None and led.verdict is None and sender in led.waiting:
            self._count(led, sender, vote)

    def _count(self, led: Led, sender: PeerId, vote: TokenVote) -> None:
        led.waiting.discard(sender)
        if not vote.is_ok:
            self._decide(led, is_applied=False)
            return
        mine = {i for i, change in enumerate(led.changes) if change[1] == sender}
        led.priced += [priced for priced in vote.priced if priced[0] in mine]
        if led.waiting:
            return
        is_complete = len({p[0] for p in led.priced}) == len(led.priced) == len(led.changes)
        delta = sum(priced[2] for priced in led.priced)
        self._decide(led, is_applied=is_complete and delta < led.limit_s)

    def _decide(self, led: Led, *, is_applied: bool) -> None:
        ctx = self._ctx
        led.verdict = TokenEnd(
            token=led.token, is_applied=is_applied, priced=tuple(led.priced) if is_applied else ()
        )
        peers = {c[1] for c in led.changes} | {c[2] for c in led.changes}
        for peer in sorted(peers - {ctx.me}):
            ctx.send(peer, led.verdict)
        self._end(ctx.me, led.verdict)
        if is_applied:
            self.num_applied += 1
            ctx.changed(led.why)
        else:
            self.num_aborted += 1
            self._rest_until = ctx.now + ctx.settings.tick_s * ctx.rng.uniform(0.2, 1.0)

    def on_ask(self, sender: PeerId, ask: TokenAsk) -> None:
        """Repeat the verdict; a token that nobody knows was aborted."""
        led = self._led.get(ask.token)
        if led is None:
            self._ctx.send(sender, TokenEnd(token=ask.token, is_applied=False))
        elif led.verdict is not None:
            self._ctx.send(sender, led.verdict)

    # -- participant

    def on_prepare(self, sender: PeerId, message: TokenPrepare) -> None:
        """Lock and price, or refuse."""
        if message.token not in self._held:
            self._ctx.send(sender, self._vote(sender, message))

    def _vote(self, initiator: PeerId, message: TokenPrepare) -> TokenVote:
        ctx, changes = self._ctx, message.changes
        refusal = TokenVote(token=message.token, is_ok=False)
        gone = self._edges(changes)
        is_mine = any(ctx.me in change[1:3] for change in changes)
        if not is_mine or gone is None or any(edge.token for edge in gone):
            return refusal
        if len({id(edge) for edge in gone}) < len(gone):
            return refusal  # an edge that ends twice would make room twice
        if not self._knows(changes) or self._is_flooded():
            return refusal
        extra = self._extra_units(changes)
        is_growing = sum(1 if change[0] else -1 for change in changes) > 0
        if extra > 0 and not self._make_room(extra, is_growing):
            return refusal
        new_ids, priced = dict[int, int](), list[Priced]()
        for i, (is_add, up, down, _, edge_id) in enumerate(changes):
            if up != ctx.me:
                continue
            if is_add:
                new_ids[i] = ctx.new_id()
                priced.append((i, new_ids[i], ctx.link_s(down)))
            else:
                priced.append((i, edge_id, -ctx.table.outs[edge_id].link_s))
        for edge in gone:
            edge.token = message.token
        extra = max(0, extra)
        ctx.reserved += extra
        ctx.num_held += 1
        self._held[message.token] = Held(
            message.token, initiator, changes, extra, ctx.tick, new_ids
        )
        return TokenVote(token=message.token, is_ok=True, priced=tuple(priced))

    def _is_flooded(self) -> bool:
        """Whether somebody makes tokens for their own sake."""
        most = _MOST_AT_SINK + 4 * self._ctx.demand
        is_full = self._ctx.is_data_node and len(self._ctx.table.ins) > most
        return is_full or len(self._held) >= MAX_HELD

    def _edges(self, changes: Iterable[Change]) -> list[InEdge | OutEdge] | None:
        """My edges that the changes end; None if one is not there."""
        ctx, edges = self._ctx, list[InEdge | OutEdge]()
        for is_add, up, down, target, edge_id in changes:
            if is_add or ctx.me not in (up, down):
                continue
            edge: InEdge | OutEdge | None = ctx.table.ins.get((up, edge_id))
            peer = up
            if up == ctx.me:
                edge, peer = ctx.table.outs.get(edge_id), down
            if edge is None or edge.peer != peer or edge.target != target:
                return None
            edges.append(edge)
        return edges

    def _knows(self, changes: Iterable[Change]) -> bool:
        """Whether all new edges of mine join neighbouring stages and peers that are there."""
        ctx, ring = self._ctx, self._ctx.num_stages + 1
        for is_add, up, down, target, _ in changes:
            if not is_add:
                continue
            if up == ctx.me and ctx.view.known.get(down) != (ctx.stage + 1) % ring:
                return False
            if down == ctx.me and ctx.view.known.get(up) != (ctx.stage - 1) % ring:
                return False
            if ctx.me in (up, down) and not ctx.is_sink(target):
                return False
        return True

    def _extra_units(self, changes: Iterable[Change]) -> int:
        """By how many units this node's use rises."""
        ctx = self._ctx
        into, out = Counter[PeerId](), Counter[PeerId]()
        for is_add, up, down, target, _ in changes:
            out[target] += (1 if is_add else -1) * (up == ctx.me)
            into[target] += (1 if is_add else -1) * (down == ctx.me)
        if ctx.is_data_node:
            return out[ctx.me]
        now_in = Counter(edge.target for edge in ctx.table.ins.values() if edge.is_live)
        now_out = Counter(edge.target for edge in ctx.table.outs.values() if edge.is_live)
        return sum(
            max(now_in[t] + into[t], now_out[t] + out[t]) - max(now_in[t], now_out[t])
            for t in {*into, *out}
        )

    def _make_room(self, extra: int, is_growing: bool) -> bool:
        """Whether ``extra`` units fit; routes that reach no source make way."""
        ctx = self._ctx
        if ctx.is_data_node:
            return len(ctx.table.outs) + ctx.reserved + extra <= ctx.demand
        if ctx.is_draining:
            return False
        if ctx.room() < extra and ctx.firm(is_growing=is_growing) + extra <= ctx.capacity:
            self._evict(extra - ctx.room(), is_growing)
        return ctx.room() >= extra

    def _evict(self, num: int, is_growing: bool) -> None:
        ctx = self._ctx
        idle = [e for e in ctx.table.outs.values() if not e.is_live and not e.token]
        if not is_growing:
            idle = [e for e in idle if e.idle_since <= ctx.tick - ctx.settings.stub_ticks]
        idle.sort(key=lambda edge: edge.into is not None)
        for outflow in idle[:num]:
            inflow = outflow.into
            ctx.table.exchange([outflow, inflow] if inflow else [outflow], (), ctx.tick)
            ctx.send(outflow.peer, FlowRelease(cancelled=(outflow.edge_id,)))
            if inflow is not None:
                ctx.send(inflow.peer, FlowRelease(pushed_back=(inflow.edge_id,)))

    def on_end(self, sender: PeerId, end: TokenEnd) -> None:
        """The initiator's word."""
        held = self._held.get(end.token)
        if held is not None and held.initiator == sender:
            self._end(sender, end)

    def _end(self, initiator: PeerId, end: TokenEnd) -> None:
        held = self._held.pop(end.token, None)
        if held is None:
            return
        self._unlock(held)
        if end.is_applied:
            self._apply(held, {p[0]: p for p in end.priced})

    def _unlock(self, held: Held) -> None:
        self._ctx.reserved -= held.reserved
        self._ctx.num_held -= 1
        edges: list[InEdge | OutEdge] = [*self._ctx.table.ins.values()]
        for edge in [*edges, *self._ctx.table.outs.values()]:
            if edge.token == held.token:
                edge.token = 0

    def _apply(self, held: Held, priced: dict[int, Priced]) -> None:
        ctx = self._ctx
        gone, new = list[InEdge | OutEdge](), list[InEdge | OutEdge]()
        for i, change in enumerate(held.changes):
            if ctx.me not in change[1:3]:
                continue
            if change[0] and i in priced:
                new.append(self._new_edge(change, priced[i], held.new_ids.get(i)))
            elif change[0]:
                continue
            else:
                gone += self._edges([change]) or []
        ctx.table.exchange(gone, new, ctx.tick)
        self._shed(new)
        vertices = [(p, side) for c in held.changes for p in c[1:3] for side in (False, True)]
        self._labels.invalidate(vertices)

    def _new_edge(self, change: Change, priced: Priced, my_id: int | None) -> InEdge | OutEdge:
        """A new edge is live at once; its real costs come with the next FlowCosts."""
        ctx, link_s = self._ctx, max(0.0, priced[2])
        _, up, down, target, _ = change
        if my_id is not None:
            others = [e.to_s for e in ctx.table.outs.values() if e.target == target]
            to_s = 0.0 if ctx.stage == ctx.num_stages else max(others, default=0.0)
            return OutEdge(down, my_id, target, link_s, to_s, ctx.tick)
        others = [e.from_s for e in ctx.table.ins.values() if e.target == target and e.is_live]
        from_s = max(others, default=0.0)
        return InEdge(up, priced[1], target, link_s, from_s, ctx.tick)

    def _shed(self, new: list[InEdge | OutEdge]) -> None:
        """Never above the capacity, whatever happened between vote and word."""
        ctx = self._ctx
        for edge in sorted(new, key=lambda edge: isinstance(edge, OutEdge)):
            if ctx.is_data_node or ctx.table.used <= ctx.capacity:
                return
            if isinstance(edge, InEdge):
                ctx.table.drop_in(edge, ctx.tick)
                ctx.send(edge.peer, FlowRelease(pushed_back=(edge.edge_id,)))
            else:
                ctx.table.drop_out(edge, ctx.tick)
                ctx.send(edge.peer, FlowRelease(cancelled=(edge.edge_id,)))

    # -- time

    def tick(self) -> None:
        """Abort tokens whose votes do not come, ask about verdicts that do not come."""
        ctx, s = self._ctx, self._ctx.settings
        for led in list(self._led.values()):
            if led.verdict is None and ctx.tick - led.begun >= s.vote_ticks:
                self._decide(led, is_applied=False)
            if ctx.tick - led.begun > s.verdict_ticks:
                del self._led[led.token]
        for held in list(self._held.values()):
            age = ctx.tick - held.since
            if age > s.verdict_ticks:
                self._unlock(self._held.pop(held.token))
            elif age >= s.ask_ticks and held.initiator != ctx.me:
                ctx.send(held.initiator, TokenAsk(token=held.token))

    def forget(self, peer: PeerId) -> None:
        """``peer`` is gone: tokens that touch it cannot be applied any more."""
        for led in list(self._led.values()):
            if led.verdict is None and peer in led.waiting:
                self._decide(led, is_applied=False)
        for held in list(self._held.values()):
            if held.initiator == peer:
                self._unlock(self._held.pop(held.token))
