"""How a node uses the memory that it was given, and what it says when that is too little."""

from __future__ import annotations

import pytest
import torch

from node.assembly import LEAST_CAPACITY, MOST_CAPACITY, frame_limits, make_stages, plan_memory
from node.config import NodeConfig
from protocol.core.transfer import CHUNK_BYTES
from protocol.errors import ConfigError, ResourceError
from protocol.manifest import Manifest, ModelSpec, PipelineSpec, TrainingSpec
from protocol.simulation.host import simulation_key
from stages import TorchBlockStage
from stages.memory import stage_bytes

MIB = 2**20


def manifest_of(stages: int | tuple[int, ...] = 2, *, quota: int = 32) -> Manifest:
    return Manifest(
        name="assembly",
        organiser=simulation_key(0).peer_id,
        model=ModelSpec(
            layers=4, width=128, heads=4, kv_heads=2, feed_forward=512, vocabulary=257, context=256
        ),
        pipeline=PipelineSpec(stages=stages),
        training=TrainingSpec(steps=1, quota=quota, microbatch=8),
    )


def needed(manifest: Manifest, stage: int, capacity: int, recompute: bool) -> int:
    return stage_bytes(manifest, stage, capacity, recompute=recompute)


def config_of(budget: int, **settings: object) -> NodeConfig:
    return NodeConfig(memory_bytes=budget, **settings)


def test_much_memory_gives_full_capacity_without_recomputing() -> None:
    manifest = manifest_of()
    plan = plan_memory(manifest, config_of(64 * 2**30))
    assert plan.fits == {1: MOST_CAPACITY, 2: MOST_CAPACITY}
    assert not any(room.recompute for room in plan.rooms.values())
    assert plan.needed_bytes == needed(manifest, 1, MOST_CAPACITY, False)


def test_a_small_quota_needs_no_more_capacity() -> None:
    assert plan_memory(manifest_of(quota=4), config_of(64 * 2**30)).capacity == 4
    assert plan_memory(manifest_of(quota=1), config_of(64 * 2**30)).capacity == LEAST_CAPACITY


@pytest.mark.parametrize("capacity", range(LEAST_CAPACITY, MOST_CAPACITY))
def test_less_memory_gives_less_capacity(capacity: int) -> None:
    manifest = manifest_of()
    budget = needed(manifest, 1, capacity + 1, False) - 1
    assert plan_memory(manifest, config_of(budget)).capacity == capacity


def test_graphs_are_given_up_before_the_stage_is() -> None:
    manifest = manifest_of()
    budget = needed(manifest, 1, LEAST_CAPACITY, False) - 1
    plan = plan_memory(manifest, config_of(budget))
    assert all(room.recompute for room in plan.rooms.values())
    assert plan.needed_bytes <= budget
    with pytest.raises(ResourceError):
        plan_memory(manifest, config_of(budget, recompute="never"))


def test_too_little_says_how_much_is_needed() -> None:
    manifest = manifest_of()
    least = needed(manifest, 1, LEAST_CAPACITY, True)
    with pytest.raises(ResourceError) as caught:
        plan_memory(manifest, config_of(3 * MIB))
    needs = f"needs {-(-least // MIB)} MiB"
    assert caught.value.cause == f"no stage fits 3 MiB; the smallest, stage 1, {needs}"
    assert f"--memory {-(-least // MIB)}MiB" in caught.value.hint
    assert "smaller stages" in caught.value.hint
    with pytest.raises(ResourceError) as caught:
        plan_memory(manifest, config_of(3 * MIB, stage=1))
    assert caught.value.cause == f"stage 1 {needs}; this node may use 3 MiB"
    assert "leave --stage out" in caught.value.hint


def test_a_node_may_fit_some_stages_and_hold_more_in_the_smaller_ones() -> None:
    manifest = manifest_of((3, 1))
    little = needed(manifest, 2, LEAST_CAPACITY, True)
    assert plan_memory(manifest, config_of(little)).fits == {2: LEAST_CAPACITY}
    enough = needed(manifest, 1, LEAST_CAPACITY, False)
    fits = plan_memory(manifest, config_of(enough)).fits
    assert fits[1] == LEAST_CAPACITY < fits[2] < MOST_CAPACITY
    budget = needed(manifest, 1, LEAST_CAPACITY, True)
    plan = plan_memory(manifest, config_of(budget))
    assert (plan.rooms[1].recompute, plan.rooms[2].recompute) == (True, False)
    make = make_stages(manifest, config_of(budget), plan, None)
    assert (make(1)._recompute, make(2)._recompute) == (True, False)
    assert plan_memory(manifest, config_of(enough, stage=2)).fits == {2: fits[2]}


def test_a_device_that_is_not_there_is_told_before_anything_is_planned() -> None:
    with pytest.raises(ConfigError, match="'toaster' cannot be used"):
        plan_memory(manifest_of(), NodeConfig(device="toaster"))


def test_a_data_node_plans_for_stage_0() -> None:
    manifest = manifest_of()
    plan = plan_memory(manifest, config_of(64 * 2**30, role="organiser"))
    assert plan.needed_bytes == needed(manifest, 0, MOST_CAPACITY, False)


def test_stages_that_do_not_exist_or_lack_text_are_refused() -> None:
    manifest, config = manifest_of(), config_of(64 * 2**30)
    make = make_stages(manifest, config, plan_memory(manifest, config), None)
    assert isinstance(make(1), TorchBlockStage)
    with pytest.raises(ConfigError, match="stage 3 does not exist"):
        make(3)
    with pytest.raises(ConfigError, match="stage 0 needs text"):
        make(0)


def test_memory_for_a_gradient_per_slot_and_for_hiveminds_copies_is_planned() -> None:
    plain = manifest_of(quota=32)
    flat = 4 * make_stage_gradients(plain)
    by_slot = plain.training.model_copy(update={"sums": "slots"})
    slots = plain.model_copy(update={"training": by_slot})
    assert needed(slots, 1, 4, False) - needed(plain, 1, 4, False) == 31 * flat
    hivemind = plain.model_copy(update={"averaging": "hivemind"})
    assert needed(hivemind, 1, 4, False) - needed(plain, 1, 4, False) == 5 * flat


def test_what_is_kept_of_a_whole_step_for_its_repair_is_planned() -> None:
    boundary = 4 * 8 * 256 * 128
    for stage in (0, 1, 2):
        more = needed(manifest_of(quota=48), stage, 4, False)
        assert more - needed(manifest_of(quota=32), stage, 4, False) == 16 * 2 * boundary


def test_a_sum_for_each_data_node_is_planned() -> None:
    plain = manifest_of()
    flat = 4 * make_stage_gradients(plain)
    authorities = tuple(simulation_key(n).peer_id for n in range(3))
    three = plain.model_copy(update={"authorities": authorities})
    assert needed(three, 1, 4, False) - needed(plain, 1, 4, False) == 2 * flat
    pipeline = plain.pipeline.model_copy(update={"min_data_nodes": 5})
    five = three.model_copy(update={"pipeline": pipeline})
    assert needed(five, 1, 4, False) - needed(plain, 1, 4, False) == 4 * flat
    assert needed(five, 0, 4, False) == needed(plain, 0, 4, False)  # it sums what it drew alone


def test_frames_hold_the_largest_shard_that_an_honest_peer_sends() -> None:
    manifest = manifest_of()
    largest = torch.empty(make_stage_gradients(manifest))
    limit = frame_limits(manifest).max_tensor_bytes
    assert limit >= max(largest.nbytes, CHUNK_BYTES)


def make_stage_gradients(manifest: Manifest) -> int:
    config = config_of(64 * 2**30)
    return make_stages(manifest, config, plan_memory(manifest, config), None)(1).num_gradients


@pytest.mark.parametrize("recovery", [{"method": "checkfree_plus"}, {"share_ends": True}])
def test_a_recovery_that_nobody_carries_out_is_refused(recovery: dict[str, object]) -> None:
    manifest = Manifest.model_validate(
        {**manifest_of(4).model_dump(mode="json"), "recovery": recovery}
    )
    config = config_of(64 * 2**30)
    with pytest.raises(ConfigError, match="not available"):
        make_stages(manifest, config, plan_memory(manifest, config), None)
