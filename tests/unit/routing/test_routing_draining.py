"""Who drains hands its flows to peers of its stage before it goes; what nobody takes goes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from protocol.messages import Message
from protocol.messages.routing import FlowOffers, FlowRelease
from protocol.routing.settings import RoutingSettings
from protocol.simulation.routing.families import Family
from protocol.simulation.routing.measure import overfull, whole_routes
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.routing.world import RoutingWorld, WorldOptions

ROOMY = Family(25, num_stages=4, capacity=(3, 5), demand=8)
STAGE = 2
QUIET_TICKS = 60
SAMPLE_S = 0.1
# Until both ends of a link know of a token, its flow does not count: one round trip for each unit.
MOST_MISSING_S = 0.5


class Overheard(RoutingWorld):
    """Keeps what one node says, once it is told to leave."""

    def __init__(self, network: RoutingNetwork, seed: int, loss: float = 0.0) -> None:
        self.leaver = -1
        self.said: list[Message] = []
        super().__init__(network, seed, WorldOptions(loss=loss))
        self.run_until(QUIET_TICKS * self.tick_s)

    def _carry(self, sender: int, receiver: int, message: Message) -> None:
        if sender == self.leaver:
            self.said.append(message)
        super()._carry(sender, receiver, message)

    def leave(self, leaver: int) -> None:
        self.leaver = leaver
        self.drain(leaver)

    def units(self, index: int) -> int:
        return len(self.residents[index].node.inflows)

    def busiest(self) -> int:
        return max(self.network.holders_of(STAGE), key=self.units)

    def pushed_back(self) -> int:
        return sum(len(m.pushed_back) for m in self.said if isinstance(m, FlowRelease))


def missing_s(world: Overheard, ticks: int) -> float:
    """Let time pass; by how many flows the swarm was below its best, times for how long."""
    best, began, missing = len(whole_routes(world)), world.now, 0.0
    world.leave(world.busiest())
    for sample in range(round(ticks * world.tick_s / SAMPLE_S)):
        world.run_until(began + sample * SAMPLE_S)
        assert overfull(world) == []
        missing += max(0, best - len(whole_routes(world))) * SAMPLE_S
    return missing


@pytest.mark.parametrize("num_data_nodes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_flow_does_not_dip_while_there_is_room(seed: int, num_data_nodes: int) -> None:
    network = replace(ROOMY, num_data_nodes=num_data_nodes).network(seed)
    world = Overheard(network, seed)
    num_units = world.units(world.busiest())
    assert num_units >= 3
    assert missing_s(world, 10) <= MOST_MISSING_S * num_units
    assert world.units(world.leaver) == 0


def test_the_flow_hardly_dips_if_messages_are_lost_too() -> None:
    world = Overheard(ROOMY.network(3), 3, loss=0.02)
    assert missing_s(world, 10) <= 2 * MOST_MISSING_S * 4
    assert world.units(world.leaver) == 0


def test_what_nobody_has_room_for_is_pushed_back_in_the_end() -> None:
    network = Family(13, num_stages=3, capacity=(2, 2)).network(1)
    world = Overheard(network, 1)
    assert len(whole_routes(world)) == network.max_flow() == 8
    world.leave(world.busiest())
    patience_s = RoutingSettings().handover_ticks * world.tick_s
    began = world.now
    world.run_until(began + patience_s - world.tick_s)
    assert world.units(world.leaver) == 2
    assert world.pushed_back() == 0
    world.run_until(began + patience_s + world.tick_s)
    assert world.units(world.leaver) == 0
    assert world.pushed_back() == 2


def test_the_only_holder_of_a_stage_pushes_its_flows_back_at_once() -> None:
    world = Overheard(Family(4, num_stages=3, capacity=(2, 2)).network(0), 0)
    (alone,) = world.network.holders_of(STAGE)
    assert world.units(alone) == 2
    world.leave(alone)
    assert world.units(alone) == 0
    assert world.pushed_back() == 2


def test_who_drains_offers_nothing_and_takes_nothing() -> None:
    world = Overheard(ROOMY.network(1), 1)
    world.leave(world.busiest())
    world.crash([next(i for i in world.network.holders_of(STAGE) if i != world.leaver)])
    world.run_until(world.now + 60 * world.tick_s)
    assert all(m.offers == () for m in world.said if isinstance(m, FlowOffers))
    node = world.residents[world.leaver].node
    assert node.inflows == node.outflows == ()


def test_a_data_node_keeps_its_flows_until_it_is_gone() -> None:
    world = Overheard(replace(ROOMY, num_data_nodes=2).network(2), 2)
    before = world.units(0)
    assert before > 0
    world.leave(0)
    world.run_until(world.now + 10 * world.tick_s)
    assert world.units(0) == before
    assert all(m.offers == () for m in world.said if isinstance(m, FlowOffers))
