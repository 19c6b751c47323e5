"""Policies by name; each run takes a new object."""

from __future__ import annotations

from protocol.simulation.training.policies.base import Policy, Recovery
from protocol.simulation.training.policies.dt_fm import DtFm
from protocol.simulation.training.policies.gwtf import Gwtf
from protocol.simulation.training.policies.planned import Chance, Greedy, Petals
from protocol.simulation.training.policies.swarm import Swarm, SwarmRecompute

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Gwtf, Swarm, SwarmRecompute, Greedy, DtFm, Petals, Chance)
}

__all__ = ["POLICIES", "Policy", "Recovery"]
