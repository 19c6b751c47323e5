"""A hop lost on the way is replaced, whatever befell it and wherever it was; nothing is reissued.

One backward crash costs at most one more forward pass of one stage, and the law holds.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from simulated_swarms import toy_swarm

from protocol.core.data_flow import DataFlow
from protocol.core.holder_flow import HolderFlow
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.ports import JobKind
from protocol.simulation.checks import check_exactly_once, check_law, check_shares
from protocol.simulation.counted_stage import CountedStage
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

KEPT = ("_kept", "_sums", "_inputs", "_drawn", "_by_head")  # whatever a stage holds of a microbatch


class Forwards:
    """Counts the forward passes of a step that are to have a way back, repairs at its end apart.

    And looks at what the stages keep when a step is over.
    """

    def __init__(self) -> None:
        self.on_path = 0
        self.recomputed = 0
        self.num_applied: Counter[int] = Counter()
        self.left: list[tuple[int, str]] = []

    def stage(self, manifest: Manifest, number: int) -> object:
        """A stage that counts."""
        inner = toy_stage(manifest, number)
        if isinstance(inner, ToyBlockStage):
            inner.forward = self._counting(inner, inner.forward)
        inner.apply = self._looking(inner, number, inner.apply)
        return inner

    def _looking(self, stage: CountedStage, number: int, apply):
        def look() -> None:
            apply()
            self.num_applied[number] += 1
            self.left += [(number, name) for name in KEPT if getattr(stage, name, None)]

        return look

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


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[HolderFlow | DataFlow]]:
    """Every node's part in the flow of every step, as long as somebody remembers it."""
    found: list[weakref.ref[HolderFlow | DataFlow]] = []

    def noting(begin):
        def note(self: HolderFlow | DataFlow, *arguments: object) -> None:
            begin(self, *arguments)
            found.append(weakref.ref(self))

        return note

    for kind in (HolderFlow, DataFlow):
        monkeypatch.setattr(kind, "__init__", noting(kind.__init__))
    return found


def check_memory(result: Result, forwards: Forwards, parts: Sequence[weakref.ref]) -> None:
    """Nothing of a step outlives it, at holders and at data nodes (invariant 10)."""
    assert set(forwards.num_applied) == set(range(NUM_STAGES + 1))
    assert forwards.left == []
    gc.collect()
    killed = {result.nodes[f.node].key.peer_id for f in result.struck if f.action == "kill"}
    alive = [part for ref in parts if (part := ref()) and part._ctx.me not in killed]
    assert len(parts) >= 3 * (len(result.nodes) - len(killed))
    per_node = Counter[PeerId](part._ctx.me for part in alive)
    assert all(count <= 1 for count in per_node.values()), per_node
    for part in alive:  # of the end, where nobody trains any more
        tries = part._works if isinstance(part, HolderFlow) else part._flows
        assert all(tried.purpose == "eval" for tried in tries.values())


def test_without_faults_nothing_is_computed_twice(parts: list[weakref.ref]) -> None:
    result, forwards, counts = play()
    check_memory(result, forwards, parts)
    assert (forwards.on_path, forwards.recomputed) == (QUOTA * NUM_STAGES, 0)
    assert counts["path_repairs"] == counts["microbatches_reissued"] == 0


@pytest.mark.parametrize("node", [FIRST, MIDDLE, LAST])
@pytest.mark.parametrize("point", PHASES)
@pytest.mark.parametrize(
    "action",
    ["kill", *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name != "kill")],
)
def test_a_fault_on_the_path_reissues_nothing(
    action: Action, point: str, node: int, parts: list[weakref.ref]
) -> None:
    fault = Fault(action, node, point, step=STEP, **FAULTS[action])
    result, forwards, counts = play(fault)
    check_memory(result, forwards, parts)
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
