"""Two runs of real daemons that sum by slot: the same bits, though a holder died in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from harness import Plan, assert_law, reference_of, run_swarm

from protocol.keys import PeerId
from protocol.manifest import Manifest


@dataclass(frozen=True)
class SlotPlan(Plan):
    """One data node and a stage of two holders."""

    steps: int = 10
    stages: int = 1
    data_nodes: int = 1
    replaced: bool = False

    def manifest(self, data_nodes: Sequence[PeerId]) -> Manifest:
        """The law's manifest, with gradients added in slot order."""
        manifest = super().manifest(data_nodes)
        training = manifest.training.model_copy(update={"sums": "slots"})
        return manifest.model_copy(update={"training": training})


@pytest.mark.slow
def test_a_death_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    quiet = run_swarm(tmp_path_factory.mktemp("quiet"), SlotPlan())
    plan = SlotPlan(faults={"stage-1-a": "after_commit@3"})
    struck = run_swarm(tmp_path_factory.mktemp("struck"), plan)
    assert struck.killed == ["stage-1-a"]
    assert struck.outcome.losses == quiet.outcome.losses
    assert struck.outcome.weights.keys() == quiet.outcome.weights.keys()
    for name, weight in struck.outcome.weights.items():
        assert torch.equal(weight, quiet.outcome.weights[name]), name
    assert_law(struck, reference_of(struck))
