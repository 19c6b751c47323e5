"""A node's units of flow: edges that come in, edges that go out, and which belongs to which."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.keys import PeerId
from protocol.messages.routing import MOST_S


@dataclass(slots=True, eq=False)
class InEdge:
    """One unit that a peer of the previous stage sends here."""

    peer: PeerId
    edge_id: int
    target: PeerId
    link_s: float
    from_s: float  # cost from the source to here; infinite: it does not reach its source yet
    born: int
    out: OutEdge | None = None
    unpaired_since: int = 0
    dead_since: int = 0  # when it last ceased to reach its source
    told_s: float = -1.0  # the cost to the sink that the upstream end knows
    token: int = 0  # locked by this token

    @property
    def is_live(self) -> bool:
        """Whether the flow reaches its source."""
        return self.from_s < math.inf


@dataclass(slots=True, eq=False)
class OutEdge:
    """One unit that goes from here to a peer of the next stage."""

    peer: PeerId
    edge_id: int
    target: PeerId
    link_s: float
    to_s: float  # cost from the peer to the sink
    born: int
    into: InEdge | None = None
    unpaired_since: int = 0
    told_s: float = -1.0  # the cost from the source that the downstream end knows
    token: int = 0

    @property
    def cost_s(self) -> float:
        """Cost from here to the sink."""
        return min(MOST_S, self.link_s + self.to_s)

    @property
    def is_live(self) -> bool:
        """Whether a flow from its source uses it (at a relay)."""
        return self.into is not None and self.into.is_live

    @property
    def idle_since(self) -> int:
        """Since when no flow from its source has used it."""
        return max(self.born, self.unpaired_since, self.into.dead_since if self.into else 0)


class FlowTable:
    """The edges of one node. A relay pairs them; a data node is the sink and source of its own."""

    def __init__(self, *, is_relay: bool) -> None:
        self.is_relay = is_relay
        self.ins: dict[tuple[PeerId, int], InEdge] = {}
        self.outs: dict[int, OutEdge] = {}
        self.num_pairs = 0

    @property
    def used(self) -> int:
        """Units that this node holds (a pair is one unit)."""
        return len(self.ins) + len(self.outs) - self.num_pairs

    def orphans(self) -> list[InEdge]:
        """Inflows without an outflow."""
        if not self.is_relay or self.num_pairs == len(self.ins):
            return []
        return [edge for edge in self.ins.values() if edge.out is None]

    def spare(self) -> list[OutEdge]:
        """Outflows without an inflow: what a relay can offer."""
        if not self.is_relay or self.num_pairs == len(self.outs):
            return []
        return [edge for edge in self.outs.values() if edge.into is None]

    def add_in(self, edge: InEdge, tick: int) -> None:
        """Take an inflow and pair it."""
        edge.unpaired_since = tick
        self.ins[edge.peer, edge.edge_id] = edge
        self.pair_up(tick)

    def add_out(self, edge: OutEdge, tick: int) -> None:
        """Take an outflow and pair it."""
        edge.unpaired_since = tick
        self.outs[edge.edge_id] = edge
        self.pair_up(tick)

    def drop_in(self, edge: InEdge, tick: int) -> None:
        """Forget an inflow; its outflow waits for another one."""
        if self.ins.pop((edge.peer, edge.edge_id), None) is None:
            return
        if edge.out is not None:
            self._unpair(edge, edge.out, tick)
        self.pair_up(tick)

    def drop_out(self, edge: OutEdge, tick: int) -> None:
        """Forget an outflow; its inflow waits for another one."""
        if self.outs.pop(edge.edge_id, None) is None:
            return
        if edge.into is not None:
            self._unpair(edge.into, edge, tick)
        self.pair_up(tick)

    def drop_peer(self, peer: PeerId, tick: int) -> bool:
        """Forget all edges to and from ``peer``; whether there were any."""
        ins = [edge for edge in self.ins.values() if edge.peer == peer]
        outs = [edge for edge in self.outs.values() if edge.peer == peer]
        for inflow in ins:
            self.drop_in(inflow, tick)
        for outflow in outs:
            self.drop_out(outflow, tick)
        return bool(ins or outs)

    def exchange(
        self,
        gone: Iterable[InEdge | OutEdge],
        new: Iterable[InEdge | OutEdge],
        tick: int,
    ) -> None:
        """Drop some edges and take others, then pair; nothing replaces an edge that is there."""
        for edge in gone:
            if isinstance(edge, InEdge):
                if self.ins.pop((edge.peer, edge.edge_id), None) and edge.out is not None:
                    self._unpair(edge, edge.out, tick)
            elif self.outs.pop(edge.edge_id, None) and edge.into is not None:
                self._unpair(edge.into, edge, tick)
        for edge in new:
            edge.unpaired_since = tick
            if isinstance(edge, InEdge):
                self.ins.setdefault((edge.peer, edge.edge_id), edge)
            else:
                self.outs.setdefault(edge.edge_id, edge)
        self.pair_up(tick)

    def num_live(self) -> int:
        """Units that reach their source."""
        return sum(edge.from_s < math.inf for edge in self.ins.values())

    def pair_up(self, tick: int) -> None:
        """Give each inflow that lacks one the cheapest outflow of its target that is spare."""
        orphans, spare = self.orphans(), self.spare()
        if not orphans or not spare:
            return
        orphans.sort(key=lambda edge: (not edge.is_live, -edge.from_s))
        spare.sort(key=lambda edge: edge.cost_s)
        for inflow in orphans:
            outflow = next((o for o in spare if o.target == inflow.target), None)
            if outflow is not None:
                spare.remove(outflow)
                inflow.out, outflow.into = outflow, inflow
                self.num_pairs += 1

    def _unpair(self, inflow: InEdge, outflow: OutEdge, tick: int) -> None:
        inflow.out, outflow.into = None, None
        inflow.unpaired_since = outflow.unpaired_since = tick
        self.num_pairs -= 1

    def improve_pairs(self) -> bool:
        """Pair costly inflows with cheap outflows, if that lowers the costliest flow (spec 1.3)."""
        changed = False
        for target in {edge.target for edge in self.ins.values()}:
            changed |= self._improve(
                [e for e in self.ins.values() if e.target == target and e.out and e.is_live]
            )
        return changed

    def _improve(self, ins: list[InEdge]) -> bool:
        if len(ins) < 2:
            return False
        outs = [edge.out for edge in ins if edge.out is not None]
        ins.sort(key=lambda edge: -edge.from_s)
        best = sorted(outs, key=lambda edge: edge.cost_s)
        if _squares(ins, best) >= _squares(ins, [e.out for e in ins if e.out]) * (1 - 1e-9):
            return False
        for inflow, outflow in zip(ins, best, strict=True):
            inflow.out, outflow.into = outflow, inflow
        return True

    def need_of(self, pending: Counter[PeerId]) -> int:
        """Units held once all ``pending`` outflows are granted."""
        if not pending:
            return self.used
        orphans = Counter(edge.target for edge in self.orphans())
        return self.used + sum(max(0, n - orphans[t]) for t, n in pending.items())


def _squares(ins: Iterable[InEdge], outs: Iterable[OutEdge]) -> float:
    """Sum of squared flow costs: lower when the costliest flow is cheaper at an equal sum."""
    return sum((i.from_s + o.cost_s) ** 2 for i, o in zip(ins, outs, strict=True))
