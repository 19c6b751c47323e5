"""The Router on flows: a microbatch takes a free unit of a flow that the nodes agreed on.

A unit of flow is room for one microbatch all the way to its data node and back. What goes beyond
the units, because flows are still forming or a next hop is gone, goes to the holder where it should
be done first. Flows are advice: nothing but speed depends on them.

The plan knows capacities and links, not queues. So a microbatch leaves it for a holder where it
would wait ``DETOUR`` times less: from its own pair of links to another free unit, and from there to
any holder. A holder that fails fast has free units and no queue, hence the bar of LoadAwareRouter
goes before both, and after ``MOST_FAULTS`` in a row flows go round it too (pains E11).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from protocol.keys import PeerId
from protocol.messages import Decision, Message
from protocol.routing.flow_node import Costs, FlowEdge, FlowNode, Send
from protocol.routing.load_aware import LoadAwareRouter
from protocol.routing.settings import RoutingSettings

DETOUR = 2.0
MOST_FAULTS = 2
FORMING_S = 30.0  # after the last change: what is missing by then is not coming


@dataclass(frozen=True, slots=True)
class FlowReport:
    """What ``status`` shows: units of flow, their mean cost to the data node, the last change."""

    inflows: tuple[FlowEdge, ...] = ()
    outflows: tuple[FlowEdge, ...] = ()
    cost_s: float | None = None
    last_change: tuple[float, str] | None = None


class FlowRouter:
    """Implements Router; ``serve`` makes this node take part in the flows."""

    def __init__(
        self,
        me: PeerId,
        *,
        costs: Costs,
        rtt_s: Callable[[PeerId], float | None],
        rng: random.Random,
        settings: RoutingSettings | None = None,
        room_of: Callable[[PeerId], int | None] = lambda _: None,
    ) -> None:
        self._me, self._costs, self._rng = me, costs, rng
        self.settings = settings or RoutingSettings()
        self._loads, self._room_of = LoadAwareRouter(rtt_s), room_of
        self._node: FlowNode | None = None
        self._capacity = 0
        self._is_draining = False
        self._decision: Decision | None = None
        self._peers: Mapping[PeerId, int] = {}
        self._absent: set[PeerId] = set()
        self._in_flight: Counter[tuple[PeerId, PeerId]] = Counter()
        self.num_by_flow = self.num_beside = 0

    # --- the Router port -------------------------------------------------------------------

    def choose(
        self,
        stage: int,
        avoid: Collection[PeerId],
        now: float,
        *,
        data_node: PeerId,
        previous: PeerId | None = None,
    ) -> PeerId | None:
        """Return the holder of ``stage`` to send to, or None if all are to be avoided."""
        chosen: PeerId | None = None
        for peers in self._tiers(data_node, previous):
            open_ = [p for p in peers if p not in avoid and not self._loads.is_barred(p, now)]
            best = min(open_, key=self._loads.wait_s, default=None)
            if best is not None and self._is_shorter(best, chosen):
                chosen = best
        by_flow = chosen
        best = self._loads.choose(stage, avoid, now)
        if best is not None and self._is_shorter(best, chosen):
            chosen = best
        self._count(is_by_flow=chosen is not None and chosen == by_flow)
        return chosen

    def _tiers(self, data_node: PeerId, previous: PeerId | None) -> Iterator[list[PeerId]]:
        """Next hops with a free unit: paired with the hop before, then all."""
        if self._node is None:
            return
        free = self._free_units(data_node)
        if previous is not None:
            pairs = self._node.pairs()
            yield sorted({
                onward.peer
                for inward, onward in pairs
                if inward.peer == previous and inward.target == data_node and onward.peer in free
            })  # fmt: skip
        yield sorted(free)

    def _free_units(self, data_node: PeerId) -> set[PeerId]:
        assert self._node is not None
        units = Counter(edge.peer for edge in self._node.outflows if edge.target == data_node)
        return {p for p, num in units.items() if num > self._in_flight[data_node, p]}

    def _is_shorter(self, peer: PeerId, chosen: PeerId | None) -> bool:
        return chosen is None or DETOUR * self._loads.wait_s(peer) < self._loads.wait_s(chosen)

    def _count(self, *, is_by_flow: bool) -> None:
        self.num_by_flow += is_by_flow
        self.num_beside += not is_by_flow

    def sent(self, peer: PeerId, now: float, *, data_node: PeerId) -> None:
        """A microbatch went to ``peer``."""
        self._in_flight[data_node, peer] += 1
        self._loads.sent(peer, now)

    def returned(self, peer: PeerId, seconds: float, now: float, *, data_node: PeerId) -> None:
        """Its gradient came back after ``seconds``."""
        self._free(data_node, peer)
        self._loads.returned(peer, seconds, now)

    def lost(self, peer: PeerId, now: float, *, data_node: PeerId, is_fault: bool) -> None:
        """It will not come back; ``is_fault`` if the peer is to blame."""
        self._free(data_node, peer)
        self._loads.lost(peer, now, is_fault=is_fault)

    def _free(self, data_node: PeerId, peer: PeerId) -> None:
        if self._in_flight[data_node, peer] > 0:
            self._in_flight[data_node, peer] -= 1

    def window(self, decision: Decision, now: float) -> int:
        """One microbatch for each flow, once the flows have formed; as many as wanted till then."""
        wanted = self._wanted(decision)
        if self._node is None or not (flows := len(self._node.outflows)):
            return wanted
        changed_at = self._node.last_change[0] if self._node.last_change else now
        has_formed = flows >= wanted or now - changed_at > FORMING_S
        return flows if has_formed else wanted

    # --- the flows -------------------------------------------------------------------------

    def serve(self, stage: int, num_stages: int, capacity: int, now: float) -> list[Send]:
        """This node has a stage; a holder keeps one of its slots for repairs."""
        self._capacity = capacity
        room = 0 if stage == 0 else max(1, capacity - 1)
        self._node = FlowNode(
            self._me, stage=stage, num_stages=num_stages, capacity=room, costs=self._costs,
            rng=self._rng, settings=self.settings,
        )  # fmt: skip
        self._peers = {}
        drained = self._node.drain(now) if self._is_draining else []
        return [*drained, *self._adjust(now)]

    def on_decision(self, decision: Decision, now: float) -> list[Send]:
        """A new roster: who is in it takes part, whoever seemed gone before."""
        if self._decision is None or decision.step != self._decision.step:
            self._in_flight.clear()
        self._decision = decision
        self._absent.clear()
        self._loads.on_decision(decision)
        return self._adjust(now)

    def handle(self, sender: PeerId, message: Message, now: float) -> list[Send]:
        """Take a message of the router of another member; others are not listened to."""
        if self._node is None or sender not in self._peers:
            return []
        return self._node.handle(sender, message, now)

    def tick(self, now: float) -> list[Send]:
        """To be called every ``settings.tick_s``."""
        if self._node is None:
            return []
        return [*self._adjust(now), *self._node.tick(now)]

    def on_session(self, peer: PeerId, is_up: bool, now: float) -> list[Send]:
        """A session with a peer came up or went down."""
        if is_up:
            self._absent.discard(peer)
        elif peer in self._peers:
            self._absent.add(peer)
        return self._adjust(now)

    def drain(self, now: float) -> list[Send]:
        """Hand the flows over; nothing new is taken."""
        self._is_draining = True
        return self._node.drain(now) if self._node else []

    def _adjust(self, now: float) -> list[Send]:
        """Tell the flow node who is there, and a data node what it may want."""
        node, decision = self._node, self._decision
        if node is None or decision is None:
            return []
        peers = self._present(decision, now)
        sends: list[Send] = []
        if peers != self._peers:
            for peer in self._peers.keys() - peers.keys():
                sends += node.lose(peer, now)
            self._peers = peers
            sends += node.set_peers(peers, now)
        if self._me in decision.data_nodes and not self._is_draining:
            sends += node.set_demand(self._wanted(decision), now)
        return sends

    def _wanted(self, decision: Decision) -> int:
        """Flows to want: by what holders said they carry; others count as if like this node."""
        usual = max(1, self._capacity - 1)
        rank = decision.data_nodes.index(self._me) if self._me in decision.data_nodes else 0
        return fair_share(decision, lambda peer: self._room_of(peer) or usual, rank)

    def _present(self, decision: Decision, now: float) -> dict[PeerId, int]:
        if self._me not in decision.members:
            return {}
        return {
            peer: stage
            for stage, holders in enumerate(decision.roster)
            for peer in holders
            if peer != self._me and peer not in self._absent and not self._rests(peer, now)
        }

    def _rests(self, peer: PeerId, now: float) -> bool:
        return self._loads.is_barred(peer, now) and self._loads.num_faults(peer) >= MOST_FAULTS

    @property
    def demand(self) -> int:
        """How many flows this data node wants; 0 at a holder."""
        return self._node.demand if self._node else 0

    @property
    def report(self) -> FlowReport:
        """The flows through this node as they are now."""
        if self._node is None:
            return FlowReport()
        outflows = self._node.outflows
        costs = [edge.link_cost_s + edge.cost_to_sink_s for edge in outflows]
        mean_s = sum(costs) / len(costs) if costs else None
        return FlowReport(self._node.inflows, outflows, mean_s, self._node.last_change)


def fair_share(decision: Decision, room_of: Callable[[PeerId], int], rank: int = 0) -> int:
    """What the narrowest stage has room for, shared by the data nodes; the first get the rest."""
    narrowest = min(sum(map(room_of, holders)) for holders in decision.roster[1:])
    share, rest = divmod(narrowest, len(decision.data_nodes))
    return max(1, share + (rank < rest))
