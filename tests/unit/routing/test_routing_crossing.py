"""Flows of different data nodes change places: what that changes, when, and what it brings."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
from routing_kit import Net, World, random_net

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.messages.routing import Change, FlowMeet, FlowWalk, Leg
from protocol.routing.crossing import WHY, Crossing, crossed
from protocol.routing.flow_node import FlowNode, RoutingSettings, Send
from protocol.routing.tokens import Led, Tokens

STAGES = 5
NET = random_net(1, 20, STAGES, (1, 3), (1, 10), demand=3, num_data=2)
ONE, TWO = NET.at(0)


def way(source: PeerId, rng: random.Random) -> tuple[Leg, ...]:
    """The links of some flow of ``source``."""
    nodes = [source, *(rng.choice(NET.at(k)) for k in range(1, STAGES + 1)), source]
    return tuple((b, rng.randrange(2**40), NET.d(a, b)) for a, b in pairwise(nodes))


def links(legs: tuple[Leg, ...]) -> list[tuple[PeerId, PeerId]]:
    return list(pairwise([legs[-1][0], *(leg[0] for leg in legs)]))


def carried(edges: Counter[tuple[PeerId, PeerId, PeerId]]) -> Counter[PeerId]:
    """The units that enter each node."""
    units: Counter[PeerId] = Counter()
    for (_, down, _), count in edges.items():
        units[down] += count
    return units


def applied(p: tuple[Leg, ...], q: tuple[Leg, ...], changes: tuple[Change, ...]) -> Counter:
    """The units on each link (upstream, downstream, target) after ``changes``."""
    edges = Counter((*link, legs[-1][0]) for legs in (p, q) for link in links(legs))
    for is_add, up, down, target, _ in changes:
        edges[up, down, target] += 1 if is_add else -1
        assert edges[up, down, target] >= 0
    return +edges


@pytest.mark.parametrize("seed", range(20))
def test_a_crossing_moves_two_whole_flows_and_no_load(seed: int) -> None:
    rng = random.Random(seed)
    p, q = way(ONE, rng), way(TWO, rng)
    first, last = sorted(rng.sample(range(STAGES + 1), 2))
    changes = crossed(p, q, first, last)
    before, after = applied(p, q, ()), applied(p, q, changes)
    assert carried(after) == carried(before)
    for source in (ONE, TWO):
        node, hops = source, 0
        while hops == 0 or node != source:
            node = next(down for up, down, target in after if (up, target) == (node, source))
            hops += 1
        assert hops == STAGES + 1
    crossings = (first, last)
    delta = sum(NET.d(p[i - 1][0], q[i][0]) + NET.d(q[i - 1][0], p[i][0]) for i in crossings)
    delta -= sum(p[i][2] + q[i][2] for i in crossings)
    told = sum(NET.d(c[1], c[2]) * (1 if c[0] else -1) for c in changes)
    assert told == pytest.approx(delta)


def test_nothing_changes_where_both_flows_go_the_same_way() -> None:
    rng = random.Random(0)
    p = way(ONE, rng)
    q = (*((peer, rng.randrange(2**40), cost) for peer, _, cost in p[:-1]), way(TWO, rng)[-1])
    assert crossed(p, q, 1, STAGES - 1) == ()


def walks(sends: list[Send]) -> list[FlowWalk]:
    return [s.message for s in sends if isinstance(s.message, FlowWalk)]


def grown(num_data: int = 2, chance: float = 0.25) -> World:
    """A world whose flows have grown."""
    net = random_net(1, 20, STAGES, (1, 3), (1, 10), demand=3, num_data=num_data)
    world = World(net, 1, loss=0.0, settings=RoutingSettings(crossing_chance=chance))
    world.run(25)
    return world


def test_a_lone_data_node_sends_nobody_on_a_walk() -> None:
    world = grown(num_data=1)
    assert world.score()[0] > 0
    assert "FlowWalk" not in world.kinds


def test_walks_price_what_two_links_more_would_cost() -> None:
    seen: list[FlowWalk] = []

    class Watched(World):
        def arrive(self, sender: PeerId, peer: PeerId, message: Message) -> None:
            if isinstance(message, FlowWalk) and self.net.stages[peer] == 0:
                seen.append(message)
            super().arrive(sender, peer, message)

    Watched(NET, 1, loss=0.0).run(15)
    assert any(walk.met for walk in seen)
    for walk in seen:
        q = walk.legs
        for p, row in zip(walk.met, walk.prices, strict=True):
            for i, price in enumerate(row[:-1]):
                new = NET.d(p[i - 1][0], q[i][0]) + NET.d(q[i - 1][0], p[i][0])
                assert price == pytest.approx(new - p[i][2] - q[i][2])


def test_a_walk_that_does_not_fit_its_flow_ends() -> None:
    world = grown()
    relay = next(p for p, n in world.nodes.items() if world.net.stages[p] == 2 and n.pairs())
    node = world.nodes[relay]
    into, _ = node.pairs()[0]
    leg, whole = (relay, into.edge_id, 1.0), way(TWO, random.Random(0))
    good = FlowWalk(edge_id=into.edge_id, legs=(leg, leg), met=(whole,), prices=((0.0, 0.0),))
    assert len(walks(node.handle(into.peer, good, world.now))) == 1
    for wrong in (
        {"legs": (leg,), "prices": ((0.0,),)},
        {"legs": (leg, (into.peer, into.edge_id, 1.0))},
        {"met": (whole[1:],)},
        {"met": ()},
        {"prices": ((0.0,),)},
        {"edge_id": into.edge_id + 1},
    ):
        assert not walks(node.handle(into.peer, good.model_copy(update=wrong), world.now))


def test_a_price_that_no_message_could_carry_is_unknown() -> None:
    world = grown()
    relay = next(p for p, n in world.nodes.items() if world.net.stages[p] == 1 and n.pairs())
    node = world.nodes[relay]
    into, _ = node.pairs()[0]
    whole = tuple((peer, edge_id, 1e9) for peer, edge_id, _ in way(TWO, random.Random(0)))
    leg = (relay, into.edge_id, 1.0)
    told = FlowWalk(edge_id=into.edge_id, legs=(leg,), met=(whole,), prices=((-1e9,),))
    (walk,) = walks(node.handle(into.peer, told, world.now))
    assert walk.prices == ((None, None),)


def met(node: FlowNode) -> set[tuple[Leg, ...]]:
    """The flows that the walks from a data node compare its own with."""
    return {legs for walk in walks(node.tick(1000.0)) for legs in walk.met}


def test_a_data_node_compares_only_whole_flows_that_another_one_says_are_its_own() -> None:
    world = grown(chance=1.0)
    node, whole = world.nodes[ONE], way(TWO, random.Random(0))
    node.handle(TWO, FlowMeet(flows=(whole,)), world.now)
    assert met(node) == {whole}
    node.handle(TWO, FlowMeet(flows=(whole[1:],)), world.now)
    node.handle(TWO, FlowMeet(flows=(way(ONE, random.Random(0)),)), world.now)
    relay = world.net.at(STAGES)[0]
    node.handle(relay, FlowMeet(flows=((*whole[:-1], (relay, 1, 1.0)),)), world.now)
    assert met(node) == {whole}


def test_a_crossing_costs_what_was_said_and_lost_words_lock_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied_s: list[tuple[float, float]] = []
    decide = Tokens._decide

    def noted(tokens: Tokens, led: Led, *, is_applied: bool) -> None:
        if led.why == WHY:
            paid_s = sum(priced[2] for priced in led.priced)
            applied_s.extend([(paid_s, led.limit_s)] * is_applied)
        decide(tokens, led, is_applied=is_applied)

    monkeypatch.setattr(Tokens, "_decide", noted)
    net = random_net(0, 20, STAGES, (1, 3), (1, 10), demand=4, num_data=3)
    world = World(net, 0, loss=0.05, settings=RoutingSettings(crossing_chance=0.5))
    world.run(25)
    assert any(paid_s < 0 for paid_s, _ in applied_s)
    assert all(paid_s < limit_s for paid_s, limit_s in applied_s)
    monkeypatch.setattr(Crossing, "_takes", lambda _, delta, __: delta < 0)
    applied_s.clear()
    world.run(10)
    assert all(paid_s < 0 for paid_s, _ in applied_s)
    monkeypatch.setattr(Tokens, "launch", lambda *_: None)
    world.run(RoutingSettings().verdict_ticks + 1)
    for node in world.nodes.values():
        table = node._ctx.table
        assert node._ctx.num_held == node._ctx.reserved == 0
        assert not any(edge.token for edge in (*table.ins.values(), *table.outs.values()))


def trap(seed: int, chance: float) -> tuple[int, float]:
    """Flow and cost where two flows are on each other's way, and any move of one costs 100 s."""
    names = {n: PeerId(f"{n:0>52}") for n in "ABabxy"}
    near = {"Ab", "by", "yA", "Ba", "ax", "xB"}
    far = {"Aa", "xA", "Bb", "yB"}
    costs = {names[n[0]] + names[n[1]]: 1.0 for n in near}
    costs |= {names[n[0]] + names[n[1]]: 10.0 for n in far}
    stages = {names[n]: stage for n, stage in zip("ABabxy", (0, 0, 1, 1, 2, 2), strict=True)}
    net = Net(
        stages=stages,
        capacity=dict.fromkeys(stages, 1),
        demand={names[n]: 1 for n in "AB"},
        compute_s=dict.fromkeys(stages, 0.0),
        link_s=lambda one, two: min(costs.get(one + two, 100.0), costs.get(two + one, 100.0)),
        num_stages=2,
    )
    world = World(
        net, seed, settings=RoutingSettings(heat=0.0, crossing_heat=0.0, crossing_chance=chance)
    )
    world.run(30)
    return world.score()


def test_flows_on_each_others_way_change_places() -> None:
    assert max(trap(seed, 0.0) for seed in range(4)) == (2, 42.0)
    assert {trap(seed, 0.25) for seed in range(4)} == {(2, 6.0)}
