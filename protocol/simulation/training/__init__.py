"""Whole training steps in virtual time: what a routing policy is worth in seconds per step.

An event heap, no tensors: compute, links, memory, aggregation, crashes and newcomers, the same for
every policy. ``run.simulate`` is the way in; docs/training-simulator.md tells the model.
"""

from protocol.simulation.training.fleet import Fleet, Workload, with_compute
from protocol.simulation.training.outcome import Outcome, StepOutcome
from protocol.simulation.training.policies import POLICIES
from protocol.simulation.training.run import simulate
from protocol.simulation.training.script import FaultScript

__all__ = [
    "POLICIES",
    "FaultScript",
    "Fleet",
    "Outcome",
    "StepOutcome",
    "Workload",
    "simulate",
    "with_compute",
]
