"""Members that say anything, and a network that repeats, forges, delays and reorders messages.

Every message is valid by itself. Nobody may break by it, hold more than its capacity, or remember
without bound; and when it is over, the flows are what they could be without the attacker.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Sequence

import pytest
from fuzz_kit import absurd
from routing_kit import Net, World, peer_name, random_net

from protocol.keys import PeerId
from protocol.messages import Message
from protocol.messages.routing import ROUTING_MESSAGES
from protocol.routing.flow_node import FlowNode

STRANGERS = tuple(peer_name(9, index) for index in range(3))
NUMBERS = (0, 1, 2, 3, 5, 2**40, 2**53 - 1, 0.0, 1e-9, 0.5, 3.0, 1e9, -1e9, -1.0, True, False)
PAST = 4000


class Hostile(World):
    """Replays what was said, and lets one node say anything to everybody."""

    def __init__(self, net: Net, seed: int, attacker: PeerId) -> None:
        self.past: list[tuple[PeerId, Message]] = []
        self.attacker, self.mischief = attacker, random.Random(seed + 1000)
        super().__init__(net, seed)

    def act(self, sender: PeerId, sends: list) -> None:
        """Note what is said."""
        for send in sends:
            self.past.append((sender, send.message))
        del self.past[: len(self.past) - PAST]
        super().act(sender, [send for send in sends if send.peer in self.net.stages])

    def leaves(self) -> Sequence[object]:
        """Numbers, members, strangers, and edges that exist."""
        edges = [e.edge_id for node in self.nodes.values() for e in node.outflows]
        tokens = [m.token for _, m in self.past if hasattr(m, "token")]
        some = self.mischief.sample(edges, min(8, len(edges))) + tokens[-4:]
        members = self.mischief.sample(sorted(self.net.stages), 6)
        return (*NUMBERS, *members, *self.net.at(0), *STRANGERS[:1], *some)

    def molest(self, num: int) -> None:
        """Say ``num`` absurd things to each node, and repeat some old ones under other names."""
        leaves = tuple(self.leaves())
        for peer in list(self.nodes):
            for _ in range(num):
                said = absurd(self.mischief.choice(ROUTING_MESSAGES), self.mischief, leaves)
                self.arrive(self.attacker, peer, said)
            sender, old = self.mischief.choice(self.past)
            self.arrive(sender, peer, old)
            self.arrive(self.mischief.choice([*self.net.stages, *STRANGERS]), peer, old)

    def overfull(self) -> list[PeerId]:
        """Relays above their capacity."""
        return [
            p for p, n in self.nodes.items()
            if self.net.stages[p]
            and len(n.inflows) + len(n.outflows) - len(n.pairs()) > self.net.capacity[p]
        ]  # fmt: skip


def size(node: FlowNode) -> int:
    """How many things a node remembers: members of all its containers."""
    seen: set[int] = set()
    total, todo = 0, [node]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | random.Random | str | int | float):
            continue
        if type(thing).__module__.startswith(("routing_kit", "pydantic")):
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | tuple):
            total += len(thing)
        if not callable(thing) and type(thing).__name__ not in ("module", "RoutingSettings"):
            todo += gc.get_referents(thing)
    return total


@pytest.mark.parametrize(("seed", "stage"), [(0, 0), (0, 1), (1, 3)])
def test_a_member_that_says_anything_breaks_nobody(seed: int, stage: int) -> None:
    net = random_net(seed, 9, 3, (2, 4), (1, 10), demand=3, num_data=2)
    attacker = net.at(stage)[0]
    world = Hostile(net, seed, attacker)
    world.run(10)
    sizes: dict[PeerId, int] = {}
    for number in range(60):
        world.molest(3)
        world.run(0.4)
        assert not world.overfull()
        if number == 30:
            sizes = {peer: size(node) for peer, node in world.nodes.items()}
    world.kill([attacker])
    for peer, node in world.nodes.items():
        assert size(node) <= 2 * sizes[peer] + 500
    flows = []
    for _ in range(40):
        world.run(1)
        assert not world.overfull()
        flows.append(world.score()[0])
    assert max(flows) == best_flow(world)


def best_flow(world: Hostile) -> int:
    """Everybody can reach everybody of the next stage: the narrowest stage limits the flow."""
    stages = [[p for p in world.nodes if world.net.stages[p] == k] for k in (1, 2, 3)]
    wanted = sum(world.net.demand[p] for p in world.net.at(0) if p in world.nodes)
    return min(wanted, *(sum(map(world.net.capacity.__getitem__, stage)) for stage in stages))
