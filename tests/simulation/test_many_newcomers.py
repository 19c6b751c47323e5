"""Twenty newcomers at once over two donors: all serve soon, and training goes on meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
from simulated_swarms import toy_swarm

from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.host import FREE
from protocol.simulation.world import NodePlan

STEPS = 6
COSTS = {**FREE, "forward": 0.05, "backward": 0.1, "update": 0.02}
NEWCOMERS = 20


@pytest.mark.slow
def test_many_newcomers_are_let_in_without_snapshots_and_without_a_pause() -> None:
    plans = [NodePlan(0), NodePlan(1), NodePlan(1)]
    plans += [NodePlan(1, joins_at_s=4.0)] * NEWCOMERS
    simulation = toy_swarm(
        num_stages=1, steps=STEPS, quota=6, plans=tuple(plans), costs=COSTS, snapshot_steps=0
    )
    result = simulation.run(limit_s=120)
    assert result.is_finished
    check_law(simulation.manifest.manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    last = max(result.decisions, key=lambda decision: decision.term)
    assert len(last.roster[1]) == 2 + NEWCOMERS
    decided = {
        (stage, d.step): digest for d in result.decisions for stage, digest in enumerate(d.digests)
    }
    for moved in result.moves:  # nobody began with anything but the decided state
        if moved.how == "import":
            assert moved.digest == decided[moved.stage, moved.step]
    # no step took longer than it would have alone, beyond the words about each newcomer
    steps = [moved.time_s for moved in result.moves if moved.how == "apply" and moved.stage == 0]
    assert len(steps) == STEPS
    assert max(after - before for before, after in pairwise(steps)) < 5
