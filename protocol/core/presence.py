"""What a node tells the authorities of itself, about once a second."""

from __future__ import annotations

from protocol.core.holding import Holding
from protocol.core.placement import Placement
from protocol.messages import Presence
from protocol.messages.membership import MOST_KEPT


def presence_of(
    holding: Holding | None,
    *,
    placement: Placement,
    capacity: int,
    seen: tuple[int, int],
    is_draining: bool,
    is_restarted: bool,
    is_paused: bool,
) -> Presence:
    """Who has no stage yet names none, and no digest whoever fetches a state."""
    stage = -1 if placement.stage is None else placement.stage
    state = holding.ctx.state if holding else None
    is_syncing = holding is not None and holding.sync.is_running
    return Presence(
        step=state.step if state else 0,
        stage=holding.ctx.stage if holding else stage,
        capacity=holding.ctx.capacity if holding else capacity,
        digest=state.digest if state and not is_syncing else None,
        seen=seen,
        wants_hold=holding is not None and holding.sync.num_runs > 1,
        is_draining=is_draining,
        is_restarted=is_restarted,
        asks_stage=placement.asks_stage,
        moves_to=-1 if placement.moves_to is None else placement.moves_to,
        lacks=holding.lacks if holding else None,
        kept=holding.keeper.kept()[:MOST_KEPT] if holding and is_paused else (),
        is_bound=placement.is_bound,
        is_rebuilt=holding is not None and holding.is_rebuilt,
    )
