"""The world: messages take time and get lost, crashes are noticed late, equal seeds run alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.messages.routing import FlowRelease
from protocol.routing.flow_node import Send
from protocol.simulation.routing import world as world_module
from protocol.simulation.routing.families import Family
from protocol.simulation.routing.measure import not_telescoping, overfull, unmatched, whole_routes
from protocol.simulation.routing.network import RoutingNetwork, peer_at
from protocol.simulation.routing.routes import faults
from protocol.simulation.routing.trial import POLICY_NAMES, Script, run_trial
from protocol.simulation.routing.world import RoutingWorld, WorldOptions

SMALL = Family(13, num_stages=3, capacity=(1, 3))
QUIET_TICKS = 60


class Witness:
    """Stands in for a FlowNode: tells its neighbour something at each tick, notes what it hears."""

    heard: ClassVar[list[tuple[float, PeerId, PeerId, int]]] = []
    lost: ClassVar[list[tuple[float, PeerId, PeerId]]] = []
    known: ClassVar[list[tuple[float, PeerId, int]]] = []

    def __init__(self, me: PeerId, **_: Any) -> None:
        self.me, self.count = me, 0

    def set_peers(self, stages: Mapping[PeerId, int], now: float) -> list[Send]:
        self.known.append((now, self.me, len(stages)))
        assert self.me not in stages
        return []

    def handle(self, sender: PeerId, message: Message, now: float) -> list[Send]:
        assert isinstance(message, FlowRelease)
        self.heard.append((now, sender, self.me, message.cancelled[0]))
        return []

    def tick(self, now: float) -> list[Send]:
        """Two messages at once: order shows. The second number is the time in ms."""
        self.count += 2
        peer = peer_at((world_module.INDEX[self.me] + 1) % SMALL.num_nodes)
        return [Send(peer, FlowRelease(cancelled=(n, int(now * 1e3)))) for n in (1, 2)]

    def lose(self, peer: PeerId, now: float) -> list[Send]:
        self.lost.append((now, self.me, peer))
        return []


@pytest.fixture
def witnessed(monkeypatch: pytest.MonkeyPatch) -> type[Witness]:
    """A world of witnesses."""
    monkeypatch.setattr(world_module, "FlowNode", Witness)
    for notes in (Witness.heard, Witness.lost, Witness.known):
        notes.clear()
    return Witness


def network(seed: int = 0) -> RoutingNetwork:
    """Thirteen nodes."""
    return SMALL.network(seed)


def test_each_node_acts_once_a_round_and_hears_in_order(witnessed: type[Witness]) -> None:
    world = RoutingWorld(network(), 1, WorldOptions(loss=0, jitter=5.0))
    world.run_until(10 * world.tick_s)
    assert world.num_ticks == 10 * SMALL.num_nodes
    assert world.num_sent == 2 * world.num_ticks
    by_pair: dict[tuple[PeerId, PeerId], list[int]] = {}
    for _, sender, receiver, number in witnessed.heard:
        by_pair.setdefault((sender, receiver), []).append(number)
    assert len(by_pair) == SMALL.num_nodes
    for numbers in by_pair.values():
        assert numbers == [1, 2] * (len(numbers) // 2)


def test_a_message_takes_at_least_the_latency(witnessed: type[Witness]) -> None:
    net = network()
    world = RoutingWorld(net, 1, WorldOptions(loss=0, jitter=0.0))
    world.run_until(world.tick_s)
    times = {sender: now for now, sender, _, _ in witnessed.heard}
    index = world_module.INDEX
    for now, sender, receiver, _ in witnessed.heard:
        latency_s = net.latency_s[index[sender], index[receiver]]
        assert latency_s <= now
    assert len(set(times.values())) > 1, "all nodes act at the same moment"


def test_the_asked_part_of_messages_is_lost(witnessed: type[Witness]) -> None:
    world = RoutingWorld(network(), 1, WorldOptions(loss=0.25))
    world.run_until(100 * world.tick_s)
    assert world.num_lost / world.num_sent == pytest.approx(0.25, abs=0.03)
    assert len(witnessed.heard) <= world.num_sent - world.num_lost


def test_each_survivor_notices_a_crash_for_itself_and_a_newcomer_too(
    witnessed: type[Witness],
) -> None:
    world = RoutingWorld(network(), 1, WorldOptions(detect_s=4.0))
    world.run_until(10.0)
    world.crash([3])
    before = len(witnessed.heard)
    world.run_until(20.0)
    name = peer_at(3)
    assert name not in {receiver for now, _, receiver, _ in witnessed.heard[before:]}
    assert sorted(me for _, me, _ in witnessed.lost) == sorted(map(peer_at, world.alive))
    times = [now for now, _, _ in witnessed.lost]
    assert 12.0 <= min(times) < max(times) <= 14.0
    witnessed.known.clear()
    world.join([3])
    world.run_until(30.0)
    assert witnessed.known[0] == (20.0, name, 12)
    others = [now for now, me, _ in witnessed.known if me != name]
    assert len(others) == 12
    assert 22.0 <= min(others) < max(others) <= 24.0


def test_who_is_back_already_is_not_lost(witnessed: type[Witness]) -> None:
    world = RoutingWorld(network(), 1, WorldOptions(detect_s=4.0))
    world.crash([3])
    world.join([3])
    world.run_until(10.0)
    assert witnessed.lost == []


def test_flows_fill_the_network_and_the_invariants_hold() -> None:
    net = network(2)
    world = RoutingWorld(net, 2, WorldOptions(loss=0.01))
    for tick in range(1, QUIET_TICKS + 1):
        world.run_until(tick * world.tick_s)
        assert overfull(world) == []
    routes = whole_routes(world)
    assert len(routes) == net.max_flow()
    assert faults(net, routes) == []


def test_tables_agree_and_costs_telescope_after_quiet() -> None:
    world = RoutingWorld(network(3), 3, WorldOptions(loss=0.0))
    world.run_until(QUIET_TICKS * world.tick_s)
    assert unmatched(world) == []
    assert not_telescoping(world) == []


def test_a_half_known_flow_is_found() -> None:
    """The checks see what they are there for: a flow that one end has forgotten."""
    world = RoutingWorld(network(3), 3, WorldOptions(loss=0.0))
    world.run_until(QUIET_TICKS * world.tick_s)
    route = whole_routes(world)[0]
    last = world.residents[route.holders[-1]].node
    last.lose(peer_at(route.holders[-2]), world.now)
    assert unmatched(world)
    assert route not in whole_routes(world) or len(whole_routes(world)) < world.network.max_flow()


def test_equal_seeds_give_equal_traces() -> None:
    net = network(1)
    script = Script(ticks=30, burst=0.2)
    first, again, other = (run_trial(net, "gwtf", script, seed) for seed in (5, 5, 6))
    assert first.digest == again.digest != other.digest
    assert first.points == again.points
    assert first.routes == again.routes


def test_a_burst_is_healed_and_told() -> None:
    trial = run_trial(SMALL.network(4), "gwtf", Script(ticks=120, burst=0.25), 4)
    (change,) = trial.changes
    assert (change.tick, change.kind, change.num_gone) == (60, "burst", 3)
    assert change.recovered is not None
    assert trial.last.worth.flow == trial.last.best.flow == change.best.flow
    assert set(trial.alive) >= {i for route in trial.routes for i in route.holders}
    assert trial.rounds_to_max_flow is not None


def test_who_drains_hands_its_flows_over_before_it_goes() -> None:
    net = network(7)
    world = RoutingWorld(net, 7, WorldOptions(loss=0.0))
    world.run_until(QUIET_TICKS * world.tick_s)
    leaver = max(net.holders_of(2), key=lambda i: len(world.residents[i].node.inflows))
    others = [i for i in range(net.num_nodes) if i != leaver]
    world.drain(leaver)
    world.run_until(2 * QUIET_TICKS * world.tick_s)
    assert world.residents[leaver].node.inflows == ()
    assert len(whole_routes(world)) == net.max_flow(others)


def test_churn_brings_back_who_left() -> None:
    script = Script(ticks=100, churn=0.2, churn_every=30)
    trial = run_trial(SMALL.network(5), "greedy", script, 5)
    assert [(c.tick, c.num_come) for c in trial.changes] == [(30, 0), (60, 2), (90, 2)]
    assert {c.num_gone for c in trial.changes} == {2}
    assert len(trial.alive) == 11


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_no_burst_ends_a_stage(policy: str) -> None:
    trial = run_trial(SMALL.network(6), policy, Script(ticks=4, burst=0.9, burst_tick=1), 6)
    stages = {trial.network.stages[i] for i in trial.alive}
    assert stages == {0, 1, 2, 3}


def test_a_burst_is_not_mixed_with_churn() -> None:
    script = Script(ticks=8, churn=0.2, churn_every=2, burst=0.3, burst_tick=4)
    changes = run_trial(SMALL.network(6), "greedy", script, 6).changes
    assert [(c.tick, c.kind) for c in changes] == [(2, "churn"), (4, "burst"), (6, "churn")]
