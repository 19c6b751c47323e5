"""How many microbatches a data node has under way follows what is known of the holders."""

from __future__ import annotations

from functools import partial

from simulated_swarms import manifest_of

from protocol.simulation.cores import node_core
from protocol.simulation.host import FREE
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.world import NodePlan, Simulation

NARROW, WIDE, JOINER = 4, 9, 6  # places; one of each holder's is for repairs
FORMED_AT_S, JOINS_AT_S, LATEST_S = 8.0, 20.0, 60.0
QUOTA = 400


def test_the_window_follows_capacities_and_newcomers_within_a_step() -> None:
    """The data node's own capacity is another one, and the step is longer than all this takes."""
    signed = manifest_of(steps=100, quota=QUOTA)
    seen: dict[float, tuple[int, int, int]] = {}
    simulation = Simulation(
        signed,
        (
            NodePlan(0, capacity=12), NodePlan(1, capacity=WIDE), NodePlan(1, capacity=WIDE),
            NodePlan(2, capacity=NARROW), NodePlan(2, capacity=JOINER, joins_at_s=JOINS_AT_S),
        ),
        build=node_core,
        stages=partial(toy_stage, signed.manifest),
        costs={**FREE, "forward": 0.5, "backward": 1.0},
    )  # fmt: skip

    def look(at_s: float) -> None:
        core = simulation.nodes[0].core
        flows = core.member.flow._flows.values()
        num_open = sum(not flow.is_ended for flow in flows)
        seen[at_s] = core.decision.step, core.routing.router._node._ctx.demand, num_open

    for at_s in (FORMED_AT_S, JOINS_AT_S - 0.1, LATEST_S):
        simulation.timeline.at(at_s, partial(look, at_s))
    simulation.run(limit_s=LATEST_S + 1)
    assert seen[FORMED_AT_S] == seen[JOINS_AT_S - 0.1] == (0, NARROW - 1, NARROW - 1)
    assert seen[LATEST_S] == (0, NARROW - 1 + JOINER - 1, NARROW - 1 + JOINER - 1)
