"""A small world of flow nodes with delays and losses, and the optimum of its network."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.routing.flow_node import FlowNode, RoutingSettings


def peer_name(stage: int, index: int) -> PeerId:
    """A name as long as a real PeerID."""
    return PeerId(f"{stage:04d}-{index:05d}".rjust(52, "P"))


@dataclass
class Net:
    """An instance: stages, capacities, compute times and symmetric link costs."""

    stages: dict[PeerId, int]
    capacity: dict[PeerId, int]
    demand: dict[PeerId, int]
    compute_s: dict[PeerId, float]
    link_s: Callable[[PeerId, PeerId], float]
    num_stages: int

    def d(self, a: PeerId, b: PeerId) -> float:
        """d_ij of spec 1.1."""
        return 0.5 * (self.compute_s[a] + self.compute_s[b]) + self.link_s(a, b)

    def at(self, stage: int) -> list[PeerId]:
        """The peers of a stage."""
        return [p for p, s in self.stages.items() if s == stage]


def random_net(
    seed: int, num_relays: int, num_stages: int, caps: tuple[int, int], costs: tuple[float, float],
    demand: int, num_data: int = 1,
) -> Net:  # fmt: skip
    """Uniform capacities and link costs, as in the instances of spec 1.7."""
    rng = random.Random(seed)
    stages = {peer_name(0, i): 0 for i in range(num_data)}
    stages |= {peer_name(1 + i % num_stages, i): 1 + i % num_stages for i in range(num_relays)}
    links: dict[frozenset[PeerId], float] = {}

    def link_s(a: PeerId, b: PeerId) -> float:
        key = frozenset((a, b))
        if key not in links:
            text = "".join(sorted((a, b))) + str(seed)
            links[key] = random.Random(text).uniform(*costs)
        return links[key]

    return Net(
        stages,
        {p: rng.randint(*caps) if s else 10**6 for p, s in stages.items()},
        {p: demand for p, s in stages.items() if s == 0},
        dict.fromkeys(stages, 0.0),
        link_s,
        num_stages,
    )


def optimum(net: Net, alive: set[PeerId] | None = None) -> tuple[int, float]:
    """Maximum flow and its least cost, for one data node (networkx, integer costs of 1e-6)."""
    graph = nx.DiGraph()
    alive = set(net.stages) if alive is None else alive
    scale = 10**6
    source = net.at(0)[0]
    graph.add_edge("S", ("out", source), capacity=net.demand[source], weight=0)
    for p in alive:
        if net.stages[p]:
            graph.add_edge(("in", p), ("out", p), capacity=net.capacity[p], weight=0)
        for q in alive:
            if net.stages[q] == (net.stages[p] + 1) % (net.num_stages + 1):
                cost = round(net.d(p, q) * scale)
                graph.add_edge(("out", p), ("in", q), weight=cost, capacity=10**6)
    flow = nx.max_flow_min_cost(graph, "S", ("in", source))
    return sum(flow["S"].values()), nx.cost_of_flow(graph, flow) / scale


@dataclass(order=True)
class Event:
    """Something at a time."""

    at: float
    order: int
    run: Callable[[], None] = field(compare=False)


class NodeCosts:
    """Reads a node's costs from the instance."""

    def __init__(self, net: Net, me: PeerId) -> None:
        self.net, self.me = net, me

    def compute_s(self) -> float:
        """From the instance."""
        return self.net.compute_s[self.me]

    def link_s(self, peer: PeerId) -> float:
        """From the instance."""
        return self.net.link_s(self.me, peer)


class World:
    """Runs the nodes of an instance: messages take 20 to 80 ms and are lost with ``loss``."""

    def __init__(
        self, net: Net, seed: int, *, loss: float = 0.01, settings: RoutingSettings | None = None
    ) -> None:
        self.net, self.loss = net, loss
        self.rng = random.Random(seed)
        self.settings = settings or RoutingSettings()
        self.now, self._order = 0.0, 0
        self.heap: list[Event] = []
        self.num_messages = 0
        self.kinds: dict[str, int] = {}
        self.nodes: dict[PeerId, FlowNode] = {}
        for p, stage in net.stages.items():
            self.nodes[p] = FlowNode(
                p, stage=stage, num_stages=net.num_stages, capacity=net.capacity[p],
                demand=net.demand.get(p, 0), costs=NodeCosts(net, p),
                rng=random.Random(f"{seed}{p}"), settings=self.settings,
            )  # fmt: skip
        for p, node in self.nodes.items():
            self.act(p, node.set_peers(net.stages, 0.0))
            self.at(self.rng.uniform(0, self.settings.tick_s), lambda p=p: self.tick(p))

    def at(self, delay: float, run: Callable[[], None]) -> None:
        """Run something ``delay`` seconds from now."""
        self._order += 1
        heapq.heappush(self.heap, Event(self.now + delay, self._order, run))

    def act(self, sender: PeerId, sends: list) -> None:
        """Put messages on their way."""
        for send in sends:
            self.num_messages += 1
            kind = type(send.message).__name__
            self.kinds[kind] = self.kinds.get(kind, 0) + 1
            if self.rng.random() >= self.loss:
                self.at(
                    self.rng.uniform(0.02, 0.08),
                    lambda s=send, p=sender: self.arrive(p, s.peer, s.message),
                )

    def arrive(self, sender: PeerId, peer: PeerId, message: Message) -> None:
        """Deliver a message."""
        if peer in self.nodes:
            self.act(peer, self.nodes[peer].handle(sender, message, self.now))

    def tick(self, p: PeerId) -> None:
        """Tick a node, again and again."""
        if p in self.nodes:
            self.act(p, self.nodes[p].tick(self.now))
            self.at(self.settings.tick_s, lambda: self.tick(p))

    def run(self, ticks: float) -> None:
        """Let time pass."""
        end = self.now + ticks * self.settings.tick_s
        while self.heap and self.heap[0].at <= end:
            event = heapq.heappop(self.heap)
            self.now = event.at
            event.run()
        self.now = end

    def kill(self, victims: list[PeerId]) -> None:
        """Crash nodes; the others learn of it at once."""
        for p in victims:
            del self.nodes[p]
        for p, node in self.nodes.items():
            for victim in victims:
                self.act(p, node.lose(victim, self.now))

    def routes(self) -> list[list[PeerId]]:
        """The complete flows, each as the list of its nodes, both ends of every edge agreeing."""
        found = []
        pairs = {
            p: {(i.peer, i.edge_id): o for i, o in node.pairs()} for p, node in self.nodes.items()
        }
        ends = {p: {(i.peer, i.edge_id) for i in node.inflows} for p, node in self.nodes.items()}
        for source in [p for p in self.nodes if self.net.stages[p] == 0]:
            for edge in self.nodes[source].outflows:
                path, at = [source], edge
                while True:
                    previous = path[-1]
                    path.append(at.peer)
                    if at.peer == source and (previous, at.edge_id) in ends[source]:
                        found.append(path)
                        break
                    step = pairs.get(at.peer, {}).get((previous, at.edge_id))
                    if step is None:
                        break
                    at = step
        return found

    def score(self) -> tuple[int, float]:
        """Number of complete flows and their total cost."""
        routes = self.routes()
        return len(routes), math.fsum(
            self.net.d(a, b) for r in routes for a, b in itertools.pairwise(r)
        )
