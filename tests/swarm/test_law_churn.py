"""The law under churn: every few steps a random holder dies, and a stranger joins in its place."""

from __future__ import annotations

import json
from random import Random

import pytest
from harness import Finished, LawSwarm, Plan, assert_law, reference_of, run_swarm

STEPS, QUOTA = 32, 24
FIRST_KILL, BETWEEN_KILLS, LAST_KILL = 5, 5, 20
NUM_KILLS = (LAST_KILL - FIRST_KILL) // BETWEEN_KILLS + 1
SEEDS = [1, 2]


class ChurningSwarm(LawSwarm):
    """Kills a holder that is not alone in its stage, and starts a volunteer that names no stage."""

    seed = 0

    def check(self) -> None:
        """Strike when it is time; whoever else dies is an error."""
        due = FIRST_KILL + BETWEEN_KILLS * len(self.killed)
        decision = self._decision() if due <= LAST_KILL else None
        if decision is not None and decision["step"] >= due:
            self._strike(decision["roster"])
        super().check()

    def _strike(self, roster: list[list[str]]) -> None:
        replicated = {peer for stage in roster[1:] if len(stage) > 1 for peer in stage}
        victims = [d for d in self.daemons if d.is_wanted and d.peer_id in replicated]
        if not victims:
            return  # those who joined last are on their way
        victim = Random(f"{self.seed}/{len(self.killed)}").choice(victims)
        victim.stage = next(k for k, stage in enumerate(roster) if victim.peer_id in stage)
        self.kill(victim.name)
        self.killed.append(victim)
        self.successors.append(self.spawn("volunteer"))

    def _decision(self) -> dict | None:
        path = self.organiser.state_dir / "decisions.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1]) if lines else None


def last_roster(finished: Finished) -> list[list[str]]:
    return finished.rosters[STEPS - 1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_holder_dies_every_five_steps(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every successor finds by itself the stage that lost a holder, and fetches its state."""
    kind = type("Churning", (ChurningSwarm,), {"seed": seed})
    plan = Plan(steps=STEPS, quota=QUOTA, data_nodes=1)
    finished = run_swarm(tmp_path_factory.mktemp("churn"), plan, kind=kind)
    assert len(finished.killed) == len(finished.successors) == NUM_KILLS
    for logged in finished.log:  # exactly once, whoever died
        assert [slot for _, slot in logged.entries] == list(range(QUOTA))
    assert_law(finished, reference_of(finished))
    lasting = [name for name in finished.successors if name not in finished.killed]
    assert all(finished.joined(name) for name in lasting)
    assert [len(stage) for stage in last_roster(finished)] == [1, 2, 2, 2]
    for name in lasting:
        status = finished.status[name]
        assert status.stage_reason in {"it had a single holder", "nobody served it"}, status
