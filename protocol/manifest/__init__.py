"""The manifest: everything that all nodes of a swarm must agree on. Its hash names the swarm.

A manifest is a TOML file of flat tables and, when signed, a ``signature`` by its organiser.
"""

from protocol.manifest.schedule import learning_rate
from protocol.manifest.signed import SignedManifest, sign
from protocol.manifest.specs import (
    DataSpec,
    Manifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    RecoverySpec,
    ScheduleSpec,
    TrainingSpec,
)
from protocol.manifest.toml import explain

__all__ = [
    "DataSpec",
    "Manifest",
    "ModelSpec",
    "OptimizerSpec",
    "PipelineSpec",
    "RecoverySpec",
    "ScheduleSpec",
    "SignedManifest",
    "TrainingSpec",
    "explain",
    "learning_rate",
    "sign",
]
