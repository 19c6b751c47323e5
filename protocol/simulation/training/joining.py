"""Where newcomers go: the daemon's own rule (``protocol.joining``) on what is there.

Newcomers of one step come one by one here; in the daemon claims have the same effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.joining import Newcomer, Standing, choose
from protocol.simulation.routing.network import peer_at

if TYPE_CHECKING:
    from protocol.simulation.training.policies.base import World

PathCost = Callable[[int], float | None]


def stage_for(world: World, newcomer: int, cost_s: PathCost) -> int:
    """Return the stage where a newcomer helps most; ``cost_s`` is what a holder's record tells."""
    nodes = _standings(world, cost_s)
    at = {node.peer: index for index, node in nodes.items()}
    me = Newcomer(
        peer_at(newcomer),
        dict.fromkeys(range(1, world.num_stages + 1), world.fleet.capacity(newcomer)),
        lambda peer: world.fleet.latency_s(newcomer, at[peer]),
    )
    return choose(me, world.num_stages, tuple(nodes.values())).stage


def _standings(world: World, cost_s: PathCost) -> dict[int, Standing]:
    network = world.fleet.network
    found = {d: Standing(peer_at(d), 0, network.demands[d]) for d in network.data_nodes}
    for stage in range(1, world.num_stages + 1):
        for n in world.holders(stage):
            found[n] = Standing(peer_at(n), stage, world.fleet.capacity(n), cost_s=cost_s(n))
    return found
