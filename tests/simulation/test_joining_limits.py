"""Volunteers that cannot read the registry, or that have not enough memory for each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from simulated_swarms import toy_swarm

from protocol.errors import SidecarError
from protocol.records import NodeRecord
from protocol.simulation.checks import check_law
from protocol.simulation.faults import Fault
from protocol.simulation.host import VirtualHost
from protocol.simulation.places import Link, uniform
from protocol.simulation.registry import SimulatedRegistry
from protocol.simulation.world import NodePlan, Result, Simulation

FAR = uniform(Link(0.08))
NEWCOMER = 4  # its number; stage 1 has two holders, stage 2 has one
SETTLED = (NodePlan(0), NodePlan(1), NodePlan(1), NodePlan(2))


class BlindRegistry(SimulatedRegistry):
    """Shows the records once, so that the node knows where others are, and never again."""

    num_looks = 0

    async def nodes(self) -> Sequence[NodeRecord]:
        self.num_looks += 1
        if self.num_looks > 1:
            raise SidecarError("the registry did not answer")
        return await super().nodes()


def joined_by(
    fits: Mapping[int, int] | None, *, is_blind: bool, steps: int = 14, **options
) -> Simulation:
    newcomer = NodePlan(None, joins_at_s=3.0, capacity=6, fits=fits)
    simulation = toy_swarm(plans=(*SETTLED, newcomer), steps=steps, profile=FAR, **options)
    attach = simulation.registry.attach

    def attach_blind(host: VirtualHost) -> SimulatedRegistry:
        is_newcomer = host.name == f"n{NEWCOMER}"
        return BlindRegistry(host, simulation.registry) if is_newcomer else attach(host)

    if is_blind:
        simulation.registry.attach = attach_blind  # type: ignore[method-assign]
    return simulation


def outcome(simulation: Simulation) -> tuple[Result, list[tuple[object, object]], bool]:
    """Play, and tell what the newcomer chose and why, and whether an authority was asked."""
    assigned = []
    simulation.network.taps.append(lambda *_, m=assigned: m.append(_[-1].kind))
    result = simulation.run()
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves)
    chosen = [
        (dict(entry.details)["stage"], dict(entry.details)["reason"])
        for entry in result.trace.find("stage_chosen")
        if entry.who == f"n{NEWCOMER}"
    ]
    return result, chosen, "assign" in assigned


def test_who_cannot_read_the_registry_is_assigned_the_stage_with_the_fewest() -> None:
    result, chosen, is_assigned = outcome(joined_by(None, is_blind=True))
    assert chosen == [(2, "an authority chose it; the registry could not be read")]
    assert is_assigned
    newcomer = result.nodes[NEWCOMER]
    assert newcomer.key.peer_id in newcomer.core.decision.roster[2]


def test_what_is_assigned_and_does_not_fit_is_not_taken() -> None:
    result, chosen, is_assigned = outcome(joined_by({1: 3}, is_blind=True))
    assert chosen == [(1, "the registry could not be read, and what was assigned does not fit")]
    assert is_assigned
    newcomer = result.nodes[NEWCOMER]
    assert newcomer.key.peer_id in newcomer.core.decision.roster[1]


@pytest.mark.parametrize(("fits", "stage"), [(None, 2), ({1: 3}, 1), ({1: 3, 2: 5}, 2)])
def test_a_volunteer_claims_only_what_fits_and_holds_as_much_as_fits_there(
    fits: Mapping[int, int] | None, stage: int
) -> None:
    simulation = joined_by(fits, is_blind=False)
    claims = []
    publish = simulation.registry.store

    def store(record: NodeRecord) -> None:
        claims.append((record.peer_id, record.claim.stage if record.claim else None))
        publish(record)

    simulation.registry.store = store  # type: ignore[method-assign]
    result, chosen, is_assigned = outcome(simulation)
    assert [where for where, _ in chosen] == [stage]
    assert not is_assigned
    newcomer = result.nodes[NEWCOMER]
    assert {c for peer, c in claims if peer == newcomer.key.peer_id} <= {None, *(fits or (1, 2))}
    assert newcomer.core.ctx.capacity == (fits or {stage: 6})[stage]


def test_who_comes_back_with_less_memory_goes_where_it_fits_now() -> None:
    """The decision counts on it at stage 2 until another holder's word leaves it out."""
    dies = Fault("kill", NEWCOMER, at_s=14.0)
    simulation = joined_by(None, is_blind=False, steps=20, faults=[dies])
    play, shrunk = simulation._play, NodePlan(None, fits={1: 3})

    async def with_return(limit_s: float, settle_s: float) -> None:
        simulation.timeline.at(14.2, lambda: simulation.spawn(NEWCOMER, shrunk))
        await play(limit_s, settle_s)

    simulation._play = with_return  # type: ignore[method-assign]
    _, chosen, _ = outcome(simulation)
    assert [where for where, _ in chosen] == [2, 1]
