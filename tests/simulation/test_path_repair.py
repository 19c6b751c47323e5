"""A hop lost on the way is replaced, whatever befell it and wherever it was; nothing is reissued.

One backward crash costs at most one more forward pass of one stage, and the law holds.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
from simulated_swarms import toy_swarm

from protocol.core.holder_flow import HolderFlow
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.ports import JobKind
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.faults import Action, Fault
from protocol.simulation.toy_stage import ToyBlockStage, toy_stage
from protocol.simulation.world import NodePlan, Result

COSTS: dict[JobKind, float] = {
    "embed": 0.02, "forward": 0.05, "backward": 0.1, "edge": 0.05,
    "commit": 0.01, "update": 0.1, "state": 0.1,
}  # fmt: skip
STAGES = (0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
FIRST, MIDDLE, LAST = 2, 5, 8
STEP, QUOTA, NUM_STAGES = 1, 12, 3
PHASES = ("after_forward", "before_backward", "after_input_gradient", "after_commit")
FAULTS = {
    "kill": {},
    "freeze": {"duration_s": 20.0},
    "slow": {"amount": 20.0, "duration_s": 10.0},
    "duplicate": {"duration_s": 5.0},
    "delay": {"amount": 2.5, "duration_s": 8.0},
}


class Forwards:
    """Counts the forward passes of a step that are to have a way back, repairs at its end apart."""

    def __init__(self) -> None:
        self.on_path = 0
        self.recomputed = 0

    def stage(self, manifest: Manifest, number: int) -> object:
        """A stage that counts."""
        inner = toy_stage(manifest, number)
        if isinstance(inner, ToyBlockStage):
            inner.forward = self._counting(inner, inner.forward)
        return inner

    def _counting(self, stage: ToyBlockStage, forward):
        def count(key, h_BTW: torch.Tensor, *, keep: bool) -> torch.Tensor:
            if keep and stage.step == STEP:
                is_recomputed = key[0] == "recompute"
                self.recomputed += is_recomputed
                self.on_path += not is_recomputed
            return forward(key, h_BTW, keep=keep)

        return count


def play(*faults: Fault) -> tuple[Result, Forwards, Counter[str]]:
    """Run a swarm under faults and check the law; return what it computed and counted."""
    forwards = Forwards()
    simulation = toy_swarm(
        num_stages=NUM_STAGES, steps=3, quota=QUOTA, min_holders=2, faults=faults,
        plans=tuple(NodePlan(stage) for stage in STAGES), costs=COSTS,
    )  # fmt: skip
    manifest = simulation.manifest.manifest
    simulation._stages = lambda stage: forwards.stage(manifest, stage)
    result = simulation.run(300.0)
    check_law(manifest, result.moves, result.messages["step_close"])
    check_shares(check_exactly_once(result.moves), result.decisions)
    assert result.is_finished
    assert [node.failure for node in result.nodes if node.failure] == []
    counts: Counter[str] = Counter()
    for node in result.nodes:
        counts.update(node.observer.counts)
    return result, forwards, counts


def test_without_faults_nothing_is_computed_twice() -> None:
    _, forwards, counts = play()
    assert (forwards.on_path, forwards.recomputed) == (QUOTA * NUM_STAGES, 0)
    assert counts["path_repairs"] == counts["microbatches_reissued"] == 0


@pytest.mark.parametrize("node", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("point", PHASES)
@pytest.mark.parametrize(
    "action",
    ["kill", *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name != "kill")],
)
def test_a_fault_on_the_path_reissues_nothing(action: Action, point: str, node: int) -> None:
    fault = Fault(action, node, point, step=STEP, **FAULTS[action])
    result, forwards, counts = play(fault)
    assert result.struck == [fault]
    assert counts["microbatches_reissued"] == 0
    extra = forwards.on_path - QUOTA * NUM_STAGES
    # each hop of a microbatch that was lost, or only late: one stage, once
    assert 0 <= extra <= counts["path_repairs"]
    if action in ("kill", "freeze"):
        assert extra + forwards.recomputed > 0
    if action == "duplicate":
        assert extra == 0


def test_two_neighbours_lost_at_once_cost_two_stages_each_at_most() -> None:
    faults = [Fault("kill", node, "before_backward", step=STEP) for node in (MIDDLE, LAST)]
    _, forwards, counts = play(*faults)
    assert counts["microbatches_reissued"] == 0
    assert forwards.on_path - QUOTA * NUM_STAGES <= 2 * counts["path_repairs"]


def test_nothing_of_a_step_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works, kept tensors and what was released go with the step."""
    flows: list[weakref.ref[HolderFlow]] = []
    begin = HolderFlow.__init__

    def note(self: HolderFlow, *arguments: object) -> None:
        begin(self, *arguments)
        flows.append(weakref.ref(self))

    monkeypatch.setattr(HolderFlow, "__init__", note)
    result, _, _ = play(Fault("kill", MIDDLE, "before_backward", step=STEP))
    gc.collect()
    holders = {node.key.peer_id for node in result.nodes if node.plan.stage}
    assert len(flows) > len(holders)
    alive: Counter[PeerId] = Counter(flow._ctx.me for ref in flows if (flow := ref()) is not None)
    assert all(count <= 1 for count in alive.values())
