"""Residual path-vector labels (spec 1.3): how a node learns of cycles that lower the total cost.

A relay has two vertices, in and out; a data node's out side is its source and its in side its sink.
Residual arcs, for each target:

    out_i -> in_j   d_ij    use another link
    in_j  -> out_j  0       if j has room                 out_j -> in_j  0  if j is used
    in_j  -> out_i  -d_ij   if the flow uses i -> j: give the link up

A label is the least cost of a walk from a vertex, with its vertices, so that whoever finds itself
in a neighbour's walk has found a cycle. Walks may begin and end anywhere (labels start at 0), since
labels rooted at the sink miss cycles upstream of a full stage. While a sink wants more flow there
are also labels rooted there: the walk from an orphan or the source is then an augmenting path.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from protocol.keys import PeerId
from protocol.messages.routing import (
    MAX_HOPS,
    MAX_LABELS,
    MOST_S,
    Change,
    FlowLabels,
    Hop,
    Label,
    LabelKey,
    Vertex,
    make_label,
)
from protocol.routing.context import Context
from protocol.routing.news import News

Arc = tuple[float, int, Label]  # cost, id of the edge it gives up (else 0), label at its far end


@dataclass(frozen=True, slots=True)
class Cycle:
    """A walk that lowers the cost, and what it changes."""

    delta_s: float
    changes: tuple[Change, ...]


@dataclass(slots=True)
class Base:
    """The best ways from one side of this node that do not cross to its other side."""

    own: Arc | None = None  # does not come back to this side
    cross: Arc | None = None  # comes back to neither side
    own_s: float = math.inf
    cross_s: float = math.inf


class Labels:
    """Computes this node's labels from its neighbours' and finds cycles on the way."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        hops = max(ctx.settings.min_hops, 3 * (ctx.num_stages + 1))
        self._max_hops = min(MAX_HOPS, hops)
        self._heard: dict[PeerId, dict[LabelKey, Label]] = {}
        self._mine: dict[LabelKey, Label | None] = {}
        self._stale: set[LabelKey] = set()
        self._told_out: dict[LabelKey, set[PeerId]] = {}
        self._upstream = News[LabelKey]()
        self._downstream = News[LabelKey]()
        self._refreshed = 0

    # -- what others say

    def on_labels(self, sender: PeerId, message: FlowLabels) -> None:
        """Keep a neighbour's labels."""
        heard = self._heard.setdefault(sender, {})
        if message.is_all:
            for key in [key for key in heard if key[2] == message.is_out]:
                del heard[key]
        for key, label in message.parsed.items():
            if label is None:
                heard.pop(key, None)
            elif self._ctx.is_sink(key[0]):
                heard[key] = label

    def forget(self, peer: PeerId) -> None:
        """``peer`` is gone, and so are walks through it."""
        self._heard.pop(peer, None)
        self.invalidate([(peer, False), (peer, True)])

    def invalidate(self, vertices: Iterable[Vertex]) -> None:
        """Forget labels through vertices whose arcs changed."""
        touched = set(vertices)
        for heard in self._heard.values():
            for key in [k for k, label in heard.items() if not touched.isdisjoint(label.at)]:
                del heard[key]

    # -- own labels

    def compute(self) -> list[Cycle]:
        """Renew all labels; return the cycles that were found, the best first."""
        found: list[Cycle] = []
        for target in self._targets():
            self._renew(target, False, found)
            self._renew(target, True, found)
        found.sort(key=lambda cycle: cycle.delta_s)
        return found

    def _targets(self) -> list[PeerId]:
        ctx = self._ctx
        if ctx.is_data_node:
            return [ctx.me]
        targets = {edge.target for edge in ctx.table.ins.values()}
        for peer in ctx.view.next:
            targets.update(key[0] for key in self._heard.get(peer, ()))
        targets.update(key[0] for key, label in self._mine.items() if label is not None)
        return sorted(targets)

    def _renew(self, target: PeerId, is_rooted: bool, found: list[Cycle]) -> None:
        ctx = self._ctx
        out = self._search(True, target, is_rooted, self._arcs_out(target, is_rooted), found)
        if ctx.is_data_node and is_rooted:
            wants = ctx.table.num_live() < ctx.demand
            root = make_label(((ctx.me, False, 0, 0.0),)) if wants else None
            self._set((target, True, False), root)
            self._set((target, True, True), self._extend(True, out.own, out.own_s))
            return
        into = self._search(False, target, is_rooted, self._arcs_in(target, is_rooted), found)
        via_in = via_out = None
        if not ctx.is_data_node:
            if into.cross is not None and into.cross_s < out.own_s and self._is_used(target):
                via_in = self._cross(True, into)
            if out.cross is not None and out.cross_s < into.own_s and self._has_room(is_rooted):
                via_out = self._cross(False, out)
        out_label = via_in or self._extend(True, out.own, out.own_s)
        in_label = via_out or self._extend(False, into.own, into.own_s)
        self._set((target, is_rooted, True), out_label)
        self._set((target, is_rooted, False), in_label)

    def _set(self, key: LabelKey, label: Label | None) -> None:
        old = self._mine.get(key)
        if (old is None) != (label is None) or (old and label and old.path != label.path):
            self._stale.add(key)
            self._mine[key] = label
            self._told_out.pop(key, None)

    def _has_room(self, is_rooted: bool) -> bool:
        """Room for another flow."""
        ctx = self._ctx
        return ctx.firm(is_growing=is_rooted) < ctx.capacity and not ctx.is_draining

    def _is_used(self, target: PeerId) -> bool:
        return any(e.target == target and e.is_live and e.out for e in self._ctx.table.ins.values())

    def _arcs_out(self, target: PeerId, is_rooted: bool) -> Iterator[Arc]:
        key = (target, is_rooted, False)
        for peer, seen in self._ctx.view.next.items():
            heard = self._heard.get(peer)
            label = heard.get(key) if heard else None
            if label is not None:
                yield seen.link_s, 0, label
            elif not is_rooted:
                yield seen.link_s, 0, Label(0.0, ((peer, False, 0, 0.0),), {(peer, False): 0})

    def _arcs_in(self, target: PeerId, is_rooted: bool) -> Iterator[Arc]:
        key = (target, is_rooted, True)
        for edge in self._ctx.table.ins.values():
            if edge.target != target or edge.token or not edge.is_live:
                continue
            heard = self._heard.get(edge.peer)
            label = heard.get(key) if heard else None
            if label is not None:
                yield -edge.link_s, edge.edge_id, label
            elif not is_rooted:
                yield (
                    -edge.link_s,
                    edge.edge_id,
                    Label(0.0, ((edge.peer, True, 0, 0.0),), {(edge.peer, True): 0}),
                )

    def _search(
        self, is_out: bool, target: PeerId, is_rooted: bool, arcs: Iterable[Arc],
        found: list[Cycle],
    ) -> Base:  # fmt: skip
        """The best arcs from one side. An arc that leads back here closes a cycle instead."""
        me, base = self._ctx.me, Base()
        own, other = (me, is_out), (me, not is_out)
        most, limit = self._max_hops, math.inf if is_rooted else -self._ctx.settings.epsilon
        for arc in arcs:
            cost = arc[0] + arc[2].cost_s
            if cost >= limit or cost >= base.cross_s:
                continue
            at = arc[2].at
            if own in at:
                if not is_rooted:
                    self._close(own, own, target, arc, found)
                continue
            if (not is_rooted or len(at) < most) and cost < base.own_s:
                base.own, base.own_s = arc, cost
            if other in at:
                if not is_rooted:
                    self._close(own, other, target, arc, found)
            elif not is_rooted or len(at) + 1 < most:
                base.cross, base.cross_s = arc, cost
        return base

    def _extend(self, is_out: bool, arc: Arc | None, cost: float) -> Label | None:
        if arc is None:
            return None
        return self._made(((self._ctx.me, is_out, arc[1], cost), *arc[2].path))

    def _cross(self, is_out: bool, base: Base) -> Label | None:
        assert base.cross is not None
        me, arc = self._ctx.me, base.cross
        first, second = (me, is_out, 0, base.cross_s), (me, not is_out, arc[1], base.cross_s)
        return self._made((first, second, *arc[2].path))

    def _made(self, path: tuple[Hop, ...]) -> Label | None:
        """A label; of a long walk only the nearest vertices are kept, with their costs."""
        if abs(path[0][3]) > MOST_S:
            return None  # somebody said something absurd
        return make_label(path[: self._max_hops])

    # -- cycles

    def _close(
        self, start: Vertex, end: Vertex, target: PeerId, arc: Arc, found: list[Cycle]
    ) -> None:
        """``arc`` leads from ``start`` along its label to ``end``, the same node's vertex."""
        if start != end and not (self._is_used(target) if end[1] else self._has_room(False)):
            return
        label = arc[2]
        place = label.at[end]
        delta = arc[0] + label.cost_s - label.path[place][3]
        if delta < -max(self._ctx.settings.epsilon, 1e-7):
            hops = ((start[0], start[1], arc[1], 0.0), *label.path[: place + 1])
            found.append(Cycle(delta, changes_of(hops, target)))

    def augmenting(self, target: PeerId) -> Cycle | None:
        """A walk from this node's out side to the sink, if it is known."""
        label = self._mine.get((target, True, True))
        if label is None or label.path[-1][:2] != (target, False):
            return None
        return Cycle(label.cost_s, changes_of(label.path, target))

    # -- telling: in labels go to who may send here, out labels to who gets flows from here

    def tell(self) -> None:
        """Send labels that changed; all of them once in a while, in case some were lost."""
        ctx = self._ctx
        is_all = ctx.tick - self._refreshed >= ctx.settings.label_refresh_ticks
        if is_all:
            self._refreshed = ctx.tick
            self._told_out.clear()
            self._stale.update(self._mine)
        changed = sorted(key for key in self._stale if not key[2])
        self._stale.clear()
        if changed or is_all:
            self._upstream.add(ctx.view.subscribers, changed, is_all=is_all)
        self._tell(self._upstream, ctx.view.subscribers, is_out=False)
        self._tell_downstream(is_all=is_all)
        self._mine = {key: label for key, label in self._mine.items() if label is not None}

    def _tell_downstream(self, *, is_all: bool) -> None:
        ctx, due = self._ctx, dict[PeerId, list[LabelKey]]()
        receivers = {(edge.target, edge.peer) for edge in ctx.table.outs.values()}
        for target, peer in sorted(receivers):
            due.setdefault(peer, [])
            for is_rooted in (False, True):
                key = (target, is_rooted, True)
                told = self._told_out.setdefault(key, set())
                if key in self._mine and peer not in told:
                    told.add(peer)
                    due[peer].append(key)
        for peer, keys in due.items():
            if keys or is_all:
                self._downstream.add([peer], keys, is_all=is_all)
        self._tell(self._downstream, due, is_out=True)

    def _tell(self, news: News[LabelKey], present: Collection[PeerId], *, is_out: bool) -> None:
        made: dict[tuple[bool, tuple[LabelKey, ...]], list[FlowLabels]] = {}
        for peer, is_all, topics in news.take(present, self._ctx.settings.audience):
            keys = sorted(topics)
            same = is_all, tuple(keys)
            if same not in made:
                made[same] = self._messages(keys, is_out, is_all)
            for message in made[same]:
                self._ctx.send(peer, message)

    def _messages(self, keys: list[LabelKey], is_out: bool, is_all: bool) -> list[FlowLabels]:
        entries = [(*key[:2], label.path if (label := self._mine.get(key)) else ()) for key in keys]
        return [
            FlowLabels(
                is_out=is_out,
                is_all=is_all and i == 0,
                labels=tuple(entries[i : i + MAX_LABELS]),
            )
            for i in range(0, max(1, len(entries)), MAX_LABELS)
        ]

    def greet(self, peer: PeerId) -> None:
        """Tell a new subscriber all in labels."""
        self._upstream.told(peer)
        keys = [key for key, label in self._mine.items() if label is not None and not key[2]]
        for message in self._messages(keys, False, True):
            self._ctx.send(peer, message)


def changes_of(hops: tuple[Hop, ...], target: PeerId) -> tuple[Change, ...]:
    """The edges that a walk adds and gives up; a step inside one node changes no edge."""
    changes: list[Change] = []
    for (a, a_out, edge_id, _), (b, _b_out, _, _) in pairwise(hops):
        if a != b and a_out:
            changes.append((True, a, b, target, 0))
        elif a != b:
            changes.append((False, b, a, target, edge_id))
    return tuple(changes)
