"""Makes the state of a stage that nobody has any more, out of those of the stages around it."""

from __future__ import annotations

from collections.abc import Collection

from protocol.core.context import Context
from protocol.core.transfer import Joiner
from protocol.errors import ProtocolViolation
from protocol.messages import Decision
from protocol.recovery import Average, CopyTwin, plan, weight_above
from protocol.step.rebuilding import situation_of


async def rebuild(ctx: Context, joiner: Joiner, decision: Decision, lost: Collection[int]) -> None:
    """Rebuild this node's stage at the start of ``decision`` (CheckFree, arXiv 2506.15461, 4.2).

    Raises PeerError if no holder of a stage that it takes could give its state.
    """
    recovery = ctx.manifest.recovery
    way = plan(situation_of(ctx.manifest, decision, lost), ctx.stage)
    if isinstance(way, Average):
        sources = way.below, way.above
    elif isinstance(way, CopyTwin):
        sources = way.twin, way.twin
    else:
        raise ProtocolViolation(f"asked to rebuild stage {ctx.stage}, which nobody can: {way}")
    fetched = {stage: await joiner.fetch_of(decision, stage) for stage in dict.fromkeys(sources)}
    await ctx.faults.reach("in_rebuild", decision.step)

    def job() -> float:
        parts = {
            stage: ctx.state.weights_of(stage, decision.digests[stage], data)
            for stage, data in fetched.items()
        }
        (below, norm_below), (above, norm_above) = (parts[stage] for stage in sources)
        weight = weight_above(norm_below, norm_above, recovery.omega_mode)
        ctx.state.rebuild_from(below, above, weight, step=decision.step, lr_scale=recovery.lr_scale)
        return weight

    weight = await ctx.compute("state", job)
    made_of = f"the mean of stages {sources[0]} and {sources[1]}"
    if len(fetched) == 1:
        made_of = f"its twin, stage {sources[0]}"
    ctx.origin = f"{made_of}, at step {decision.step}"
    ctx.observer.count("stages_rebuilt")
    ctx.observer.event(
        "stage_rebuilt", stage=ctx.stage, step=decision.step, below=sources[0], above=sources[1],
        weight_above=round(weight, 4),
    )  # fmt: skip
