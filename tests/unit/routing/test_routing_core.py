"""The flow node in a small world: routes grow to the maximum flow under delay and loss."""

from __future__ import annotations

import pytest
from routing_kit import World, optimum, random_net


@pytest.mark.parametrize("seed", range(3))
def test_routes_grow_to_the_maximum_flow(seed: int) -> None:
    net = random_net(seed, 32, 8, (2, 5), (1, 10), demand=20)
    best, _ = optimum(net)
    world, flows = World(net, seed), list[int]()
    while best not in flows:
        world.run(1)
        flows.append(world.score()[0])
        assert len(flows) < 60
    assert max(flows) == best
