"""What becomes of a stage that lost all its holders (CheckFree, CheckFree+, arXiv 2506.15461).

Pure rules: ``plan`` says from what a stage is rebuilt, ``weight_above`` how much each neighbour
counts, and ``stage_order`` in which order a microbatch passes the stages. The tensors are
``stages.recovery``'s; who rebuilds, and when that counts, is ``protocol.step.rebuilding``.
"""

from protocol.recovery.order import is_swapped, num_swapped, stage_order, twin_of
from protocol.recovery.plan import (
    Average,
    CopyTwin,
    FromCheckpoint,
    FromEnds,
    Holding,
    Plan,
    Refuse,
    Replicate,
    Situation,
    plan,
)
from protocol.recovery.weights import weight_above

__all__ = [
    "Average",
    "CopyTwin",
    "FromCheckpoint",
    "FromEnds",
    "Holding",
    "Plan",
    "Refuse",
    "Replicate",
    "Situation",
    "is_swapped",
    "num_swapped",
    "plan",
    "stage_order",
    "twin_of",
    "weight_above",
]
