"""The law on real processes: a swarm computes what one computer would have computed."""

from __future__ import annotations

import pytest
from harness import Finished, LawSwarm, Plan, assert_law, reference_of, run_swarm
from process_memory import patterns_in_memory
from reference.loop import layers_per_stage, stage_parameters

STATE_COPIES = 6  # weights and AdamW's two moments, of this step and of the next


@pytest.fixture(scope="module")
def held_in_memory() -> dict[str, set[int]]:
    """By daemon, the stages whose trained weights stood in its memory at the end."""
    return {}


@pytest.fixture(scope="module")
def finished(
    held_in_memory: dict[str, set[int]], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """20 steps of 2 data nodes and 3 stages x 2 holders."""

    def look(swarm: LawSwarm) -> None:
        rows = {
            daemon.stage or 0: next(iter(swarm.weights_of(daemon).values()))[-1]
            for daemon in swarm.daemons
        }
        patterns = {stage: row.numpy().tobytes() for stage, row in rows.items()}
        for daemon in swarm.daemons:
            held_in_memory[daemon.name] = patterns_in_memory(daemon.pid, patterns)

    return run_swarm(tmp_path_factory.mktemp("law"), Plan(), look)


def owned(finished: Finished) -> list[list[str]]:
    """The parameters of each stage, by the manifest."""
    layers = finished.manifest["model"]["layers"]
    split = layers_per_stage(finished.manifest["pipeline"]["stages"], layers)
    return stage_parameters(finished.outcome.weights, split)


def test_every_loss_and_weight_is_that_of_one_computer(finished: Finished) -> None:
    reference = reference_of(finished)
    assert reference.losses[19] < reference.losses[0] - 0.05  # it did train
    assert_law(finished, reference)


def test_every_step_has_its_whole_quota(finished: Finished) -> None:
    for logged in finished.log:
        assert [slot for _, slot in logged.entries] == list(range(8))
        assert {node for node, _ in logged.entries} == set(finished.rosters[logged.step][0])


def test_no_daemon_holds_another_stages_parameters(finished: Finished) -> None:
    stages = owned(finished)
    for name, weights in finished.weights.items():
        assert sorted(weights) == sorted(stages[finished.stages[name]]), name


def test_no_process_has_another_stages_weights_in_memory(
    finished: Finished, held_in_memory: dict[str, set[int]]
) -> None:
    assert held_in_memory == {name: {stage} for name, stage in finished.stages.items()}


def test_state_digests_are_those_of_the_stages_and_no_larger(finished: Finished) -> None:
    stages = owned(finished)
    digests = [set() for _ in stages]
    for name, status in finished.status.items():
        stage = finished.stages[name]
        elements = sum(finished.outcome.weights[p].numel() for p in stages[stage])
        assert status.state_bytes == pytest.approx(4 * STATE_COPIES * elements, rel=0.02), name
        digests[stage].add(status.state_digest)
    assert len(finished.status) == len(finished.weights)
    assert all(len(of_stage) == 1 for of_stage in digests)
    assert len(set.union(*digests)) == len(stages)


def test_the_kernel_counted_the_boundary_tensors(finished: Finished) -> None:
    model, training = finished.manifest["model"], finished.manifest["training"]
    tensor_bytes = 4 * training["microbatch"] * model["context"] * model["width"]
    crossings = 2 * (finished.manifest["pipeline"]["stages"] + 1)  # there and back
    microbatches = sum(len(logged.entries) for logged in finished.log)
    assert finished.traffic_bytes >= tensor_bytes * crossings * microbatches


def test_one_stage_with_one_holder(tmp_path_factory: pytest.TempPathFactory) -> None:
    plan = Plan(stages=1, holders=1, data_nodes=1)
    alone = run_swarm(tmp_path_factory.mktemp("one"), plan)
    assert_law(alone, reference_of(alone))
