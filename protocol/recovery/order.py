"""In which order a microbatch passes the stages.

CheckFree+ (arXiv 2506.15461, section 4.3): half of the microbatches run 2, 1, 3, ..., S, S-1, so
that the first two and the last two stages learn each other's work and can stand in for each other.
Validation and generation keep the plain order.
"""

from __future__ import annotations

from protocol.manifest import RecoverySpec


def is_swapped(recovery: RecoverySpec, slot: int) -> bool:
    """Whether the microbatch of this slot, numbered from 0 in its step, runs in swapped order."""
    return recovery.method == "checkfree_plus" and slot % 2 == 1


def num_swapped(recovery: RecoverySpec, quota: int) -> int:
    """Number of swapped microbatches of a step: floor(quota / 2) with CheckFree+."""
    return sum(is_swapped(recovery, slot) for slot in range(quota))


def stage_order(
    recovery: RecoverySpec, num_stages: int, slot: int | None = None
) -> tuple[int, ...]:
    """Return the stages 1..S in the order in which a slot's microbatch passes them.

    None is for what does not train: validation and generation.
    """
    plain = tuple(range(1, num_stages + 1))
    if slot is None or not is_swapped(recovery, slot):
        return plain
    return (2, 1, *plain[2:-2], num_stages, num_stages - 1)


def twin_of(recovery: RecoverySpec, num_stages: int, stage: int) -> int | None:
    """Return the stage that can stand in for an end or for its neighbour; None for others."""
    if recovery.method != "checkfree_plus":
        return None
    pairs = ((1, 2), (num_stages - 1, num_stages))
    return next((a + b - stage for a, b in pairs if stage in (a, b)), None)
