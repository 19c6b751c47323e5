"""Puts the real node core on simulated ports."""

from __future__ import annotations

from protocol.core import NodeCore, NodePorts, NodeSettings
from protocol.simulation.adapter import address_of
from protocol.simulation.world import SimulatedNode, Simulation


def node_core(simulation: Simulation, node: SimulatedNode) -> NodeCore:
    """Return the core that the daemon runs, on the ports of a simulated node."""
    settings = NodeSettings(
        stage=node.plan.stage,
        capacity=node.plan.capacity,
        fits=node.plan.fits,
        deadlines=simulation.deadlines,
        addresses=lambda: (address_of(node.host.peer),),
        wall_clock=simulation.wall_clock,
        snapshot_steps=simulation.snapshot_steps,
        migration=simulation.migration,
    )
    ports = NodePorts(
        network=node.network,
        registry=node.registry,
        runner=node.runner,
        make_stage=node.stage_factory,
        journal=node.journal,
        observer=node.observer,
        faults=node.faults,
        rng=node.rng,
        snapshots=node.snapshots,
    )
    return NodeCore(node.key, simulation.manifest.manifest, ports, settings)
