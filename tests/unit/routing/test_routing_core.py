"""The flow node in a small world: routes grow to the maximum flow and stay within capacities."""

from __future__ import annotations

import pytest
from routing_kit import World, optimum, random_net


@pytest.mark.parametrize("seed", range(3))
def test_routes_grow_to_the_maximum_flow(seed: int) -> None:
    net = random_net(seed, 32, 8, (2, 5), (1, 10), demand=20)
    world = World(net, seed)
    world.run(60)
    flow, _ = world.score()
    assert flow == optimum(net)[0]
