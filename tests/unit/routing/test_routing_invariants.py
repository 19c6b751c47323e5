"""What always holds of the flow router (invariants 1-6 and 11 of the GWTF spec, section 1.6)."""

from __future__ import annotations

import pytest
from routing_kit import Net, World, optimum, random_net

from protocol.keys import PeerId
from protocol.messages.routing import TokenEnd
from protocol.routing.flow_node import FlowEdge, RoutingSettings

COLD = RoutingSettings(heat=0.0)  # without annealing, which may take a worse exchange
TOLERANCE_S = 1e-6


def instance(seed: int, num_data: int = 1) -> Net:
    return random_net(seed, 32, 8, (2, 5), (1, 10), demand=20 // num_data, num_data=num_data)


def overfull(world: World) -> list[PeerId]:
    held = {
        p: len(n.inflows) + len(n.outflows) - len(n.pairs())
        for p, n in world.nodes.items()
        if world.net.stages[p]
    }
    return [p for p, used in held.items() if used > world.net.capacity[p]]


def one_sided(world: World) -> set[tuple[PeerId, PeerId, int]]:
    """Edges that only one of their ends knows."""
    outs = {(p, e.peer, e.edge_id) for p, n in world.nodes.items() for e in n.outflows}
    ins = {(e.peer, p, e.edge_id) for p, n in world.nodes.items() for e in n.inflows}
    return outs ^ ins


def quiet(world: World, ticks: int) -> None:
    """Let nothing get lost for a while."""
    world.loss = 0.0
    world.run(ticks)


@pytest.mark.parametrize("seed", range(2))
def test_no_node_ever_holds_more_than_its_capacity(seed: int) -> None:
    world = World(instance(seed), seed, loss=0.05)
    for tick in range(40):
        world.run(1)
        assert not overfull(world)
        if tick == 20:
            world.kill([world.net.at(k)[0] for k in (2, 5)])


@pytest.mark.parametrize("seed", range(2))
def test_both_ends_agree_on_every_edge_after_a_quiet_while(seed: int) -> None:
    world = World(instance(seed), seed, loss=0.1)
    world.run(60)
    quiet(world, 60)
    before = one_sided(world)
    world.run(12)
    assert not before & one_sided(world)


def follow(world: World, source: PeerId, edge: FlowEdge) -> list[PeerId]:
    """The nodes of a flow as far as it goes, wherever it ends."""
    pairs = {p: {(i.peer, i.edge_id): o for i, o in n.pairs()} for p, n in world.nodes.items()}
    path, at = [source], edge
    while True:
        before = path[-1]
        path.append(at.peer)
        onward = pairs[at.peer].get((before, at.edge_id))
        if onward is None:
            return path
        assert onward.target == edge.target
        at = onward


def test_each_flow_visits_every_stage_once_and_returns_to_its_own_data_node() -> None:
    world = World(instance(3, num_data=2), 3)
    world.run(40)
    num_home = 0
    for source in world.net.at(0):
        for edge in world.nodes[source].outflows:
            path = follow(world, source, edge)
            stages = [world.net.stages[p] for p in path]
            assert stages == [*range(9), 0][: len(path)]
            assert stages[-1] != 0 or path[-1] == source
            num_home += path[-1] == source
    assert num_home >= 10  # the smallest stage carries 12


def test_a_token_that_only_exchanges_lowers_the_cost() -> None:
    applied: list[tuple[float, int]] = []

    class Watched(World):
        def act(self, sender: PeerId, sends: list) -> None:
            for send in sends:
                if isinstance(send.message, TokenEnd) and send.message.is_applied:
                    costs = [priced[2] for priced in send.message.priced]
                    applied.append((sum(costs), sum(1 if c > 0 else -1 for c in costs)))
            super().act(sender, sends)

    Watched(instance(1), 1, settings=COLD).run(30)
    assert len(applied) > 20
    assert all(delta < 0 for delta, growth in applied if growth == 0)


def test_the_cost_to_the_sink_telescopes_along_each_flow() -> None:
    world = World(instance(2), 2)
    world.run(150)
    quiet(world, 30)
    told = {(p, e.edge_id): e for p, n in world.nodes.items() for e in n.outflows}
    assert told
    for p, node in world.nodes.items():
        for into, out in node.pairs():
            expected = out.link_cost_s + out.cost_to_sink_s
            assert into.cost_to_sink_s == pytest.approx(expected, abs=TOLERANCE_S)
            upstream = told[into.peer, into.edge_id]
            assert upstream.peer == p
            assert upstream.cost_to_sink_s == pytest.approx(expected, abs=TOLERANCE_S)


@pytest.mark.parametrize("seed", range(2))
def test_the_flow_is_at_its_maximum_again_after_a_burst(seed: int) -> None:
    net = instance(seed)
    world = World(net, seed)
    world.run(40)
    world.kill([net.at(k)[-1] for k in (1, 3, 4, 6, 8)])
    best, _ = optimum(net, set(world.nodes))
    reached = False
    for _ in range(60):
        world.run(1)
        reached = reached or world.score()[0] == best
    assert reached


def test_the_cost_ends_at_the_optimum_and_stays_there() -> None:
    net = instance(4)
    world = World(net, 4)
    world.run(150)
    flow, cost = world.score()
    best_flow, best_cost = optimum(net)
    assert flow == best_flow
    assert cost <= best_cost * 1.001
    world.run(30)
    assert world.score()[1] <= cost + TOLERANCE_S


def test_the_same_seed_gives_the_same_trace() -> None:
    def trace() -> list[str]:
        lines: list[str] = []

        class Traced(World):
            def act(self, sender: PeerId, sends: list) -> None:
                lines.extend(f"{self.now} {sender} {send}" for send in sends)
                super().act(sender, sends)

        Traced(instance(5), 5).run(15)
        return lines

    assert trace() == trace()


def test_a_draining_node_ends_without_flows() -> None:
    world = World(instance(0), 0)
    world.run(40)
    leaving = max(world.net.at(4), key=lambda p: len(world.nodes[p].inflows))
    assert world.nodes[leaving].inflows
    world.act(leaving, world.nodes[leaving].drain(world.now))
    world.run(40)
    assert not world.nodes[leaving].inflows
