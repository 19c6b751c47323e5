"""A holder that freezes is routed around, comes back with the right state, and the law holds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from harness import Finished, LawSwarm, Plan, assert_law, reference_of, run_swarm

pytestmark = pytest.mark.slow
VICTIM, STAGE = "stage-1-a", 1
FREEZE_AT_STEP, STEPS = 3, 60  # beyond, rounding grows past the tolerance
ALONE_S = 15.0  # the only holder cannot be left out: the swarm pauses


class FreezingSwarm(LawSwarm):
    """Freezes a holder until the others go on without it, then lets it come back."""

    frozen_s = 0.0
    _frozen_at: float | None = None
    _is_thawed = False

    def check(self) -> None:
        """Freeze and thaw when the roster says that it is time."""
        super().check()
        step, holders = self._roster()
        if self._frozen_at is None and step >= FREEZE_AT_STEP:
            self.freeze(VICTIM)
            self._frozen_at = time.monotonic()
        elif self._frozen_at and not self._is_thawed:
            self.frozen_s = time.monotonic() - self._frozen_at
            is_left_out = self[VICTIM].peer_id not in holders
            if is_left_out or (len(holders) == 1 and self.frozen_s > ALONE_S):
                self.thaw(VICTIM)
                self._is_thawed = True

    def _roster(self) -> tuple[int, list[str]]:
        file = self.root / "data-1" / "decisions.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        last = json.loads(lines[-1]) if lines else {"step": -1, "roster": [[], []]}
        return last["step"], last["roster"][STAGE]


def frozen(root: Path, plan: Plan) -> tuple[Finished, float]:
    """Train with a holder that freezes; return for how long it did. The law must hold."""
    seen: list[FreezingSwarm] = []
    finished = run_swarm(root, plan, seen.append, FreezingSwarm)
    for logged in finished.log:
        assert [slot for _, slot in logged.entries] == list(range(plan.quota))
    assert_law(finished, reference_of(finished))
    return finished, seen[0].frozen_s


def test_a_frozen_holder_is_routed_around_and_re_enters(tmp_path: Path) -> None:
    finished, frozen_s = frozen(tmp_path, Plan(steps=STEPS, stages=1, data_nodes=1, quota=4))
    assert 0 < frozen_s < 60  # a session's silence, not a step's or an averaging's limit
    peer = finished.peers[VICTIM]
    assert [step for step, roster in finished.rosters.items() if peer not in roster[STAGE]]
    assert peer in finished.rosters[STEPS - 1][STAGE]


def test_the_only_holder_freezes_and_the_swarm_waits_for_it(tmp_path: Path) -> None:
    plan = Plan(steps=20, stages=1, holders=1, data_nodes=1, quota=4)
    _, frozen_s = frozen(tmp_path, plan)
    assert frozen_s > ALONE_S
