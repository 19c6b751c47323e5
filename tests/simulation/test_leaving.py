"""Leaving: with the step in flight, and at once when nobody can end that step."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from simulated_swarms import manifest_of, plans_of

from protocol.core import NodeCore
from protocol.simulation.cores import node_core
from protocol.simulation.faults import Fault
from protocol.simulation.host import FREE
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.world import NodePlan, SimulatedNode, Simulation

DATA, FIRST, LAST = 0, 1, 2  # a data node, which is the authority, and the holders of two stages
KILLED_AT_S, DRAINED_AT_S, HANDED_OVER_AT_S = 3.0, 20.0, 60
# With the authority's silence or without it, far less than ``drain_s``.
AT_ONCE_S = 3.0


class Leavers:
    """A swarm in which one node dies and then another is asked to leave."""

    def __init__(self, killed: int | None, leaves: int, steps: int = 10_000) -> None:
        self.leaves, self.core = leaves, None
        self.went_at_s = float("inf")
        signed = manifest_of(steps=steps)
        self.simulation = Simulation(
            signed,
            plans_of(1, 2, 1),
            build=self.build,
            stages=partial(toy_stage, signed.manifest),
            costs={**FREE, "forward": 0.2, "backward": 0.2},
            faults=() if killed is None else (Fault("kill", killed, at_s=KILLED_AT_S),),
        )

    def build(self, simulation: Simulation, node: SimulatedNode) -> Leavers | NodeCore:
        core = node_core(simulation, node)
        if node.index != self.leaves:
            return core
        self.core = core
        simulation.timeline.at(DRAINED_AT_S, core.drain)
        return self

    async def run(self) -> None:
        await self.core.run()
        self.went_at_s = trio.current_time()

    async def save(self) -> None:
        await self.core.save()


@pytest.mark.parametrize(
    ("killed", "leaves"), [(LAST, FIRST), (LAST, DATA), (DATA, FIRST)], ids=str
)
def test_a_node_leaves_a_paused_swarm_at_once(killed: int, leaves: int) -> None:
    leavers = Leavers(killed, leaves)
    leavers.simulation.run(limit_s=60)
    assert DRAINED_AT_S <= leavers.went_at_s < DRAINED_AT_S + AT_ONCE_S


def test_a_node_ends_the_step_in_flight_before_it_leaves() -> None:
    leavers = Leavers(None, FIRST)
    result = leavers.simulation.run(limit_s=60)
    step = leavers.core.ctx.state.step
    opened = [d for d in result.decisions if d.step == step]
    assert leavers.went_at_s < 60
    assert step > 0
    assert opened, "it left with the step that others had opened"


def test_who_leaves_hands_its_flows_over_before_it_goes() -> None:
    """The data node has as many flows as before all the time."""
    flows: dict[int, list[int]] = {DATA: [], FIRST: []}
    signed = manifest_of(steps=10_000, quota=12)

    def build(simulation: Simulation, node: SimulatedNode) -> NodeCore:
        core = node_core(simulation, node)
        if node.index == FIRST:
            simulation.timeline.at(HANDED_OVER_AT_S, core.drain)
        return core

    def look(simulation: Simulation) -> None:
        cores = {index: simulation.nodes[index].core for index in flows}
        if cores[FIRST].ctx.me in cores[DATA].decision.members:
            for index, core in cores.items():
                report = core.routing.router.report
                flows[index].append(len(report.outflows if index == DATA else report.inflows))

    # stage 2 carries less than stage 1 could without the one that leaves
    simulation = Simulation(
        signed,
        (*plans_of(1, 1, 3, capacity=8), NodePlan(2, capacity=10)),
        build=build,
        stages=partial(toy_stage, signed.manifest),
        costs={**FREE, "forward": 1.0, "backward": 2.0},
    )
    for number in range(400):
        at_s = HANDED_OVER_AT_S + 0.01 * (number - 1)
        simulation.timeline.at(at_s, partial(look, simulation))
    simulation.run(limit_s=HANDED_OVER_AT_S + 20)
    assert flows[FIRST][0] > 0
    assert flows[FIRST][-1] == 0
    assert min(flows[DATA]) == flows[DATA][0] == 9
