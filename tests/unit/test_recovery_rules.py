"""What a lost stage is rebuilt from, by which weights, in which order, and whose result counts."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_manifest import manifest

from protocol.errors import ConfigError
from protocol.manifest import RecoverySpec
from protocol.recovery import (
    Average,
    CopyTwin,
    FromCheckpoint,
    FromEnds,
    Holding,
    Refuse,
    Replicate,
    Situation,
    is_swapped,
    num_swapped,
    plan,
    stage_order,
    twin_of,
    weight_above,
)

NONE = RecoverySpec()
CHECKFREE = RecoverySpec(method="checkfree")
PLUS = RecoverySpec(method="checkfree_plus")
NORMS = st.floats(min_value=1e-3, max_value=1e3)


def situation(
    recovery: RecoverySpec, num_stages: int, lost: set[int], checkpoints: set[int] = frozenset()
) -> Situation:
    """One holder per stage at steps 7 and 8; those of lost stages are there and empty."""
    return Situation(
        recovery,
        num_stages,
        {k: [Holding(f"h{k}", () if k in lost else (7, 8))] for k in range(num_stages + 1)},
        {k: [Holding(f"c{k}", (3,))] for k in checkpoints},
    )


# --- the plan --------------------------------------------------------------------------------


def test_a_living_replica_comes_first() -> None:
    holders = [Holding("c", (8,)), Holding("b", (8, 7)), Holding("a", (7,)), Holding("d")]
    given = Situation(PLUS, 4, {2: holders})
    assert plan(given, 2) == Replicate(2, "b", 8)


def test_an_interior_stage_is_averaged_at_the_newest_common_step() -> None:
    holders = {1: [Holding("a", (8, 7))], 2: [Holding("b")], 3: [Holding("c", (7, 6))]}
    assert plan(Situation(CHECKFREE, 3, holders), 2) == Average(2, 1, 3, 7)


def test_without_a_common_step_nothing_is_averaged() -> None:
    holders = {1: [Holding("a", (8,))], 3: [Holding("c", (7,))]}
    refused = plan(Situation(CHECKFREE, 3, holders), 2)
    assert isinstance(refused, Refuse)
    assert "no step in common" in refused.reason


@pytest.mark.parametrize(
    ("stage", "lost", "expected"),
    [
        (1, {1}, CopyTwin(1, 2, 8)),
        (2, {2}, CopyTwin(2, 1, 8)),
        (5, {5}, CopyTwin(5, 6, 8)),
        (6, {6}, CopyTwin(6, 5, 8)),
        (3, {3}, Average(3, 2, 4, 8)),
        (1, {1, 3}, CopyTwin(1, 2, 8)),
        (3, {1, 3}, Average(3, 2, 4, 8)),
    ],
)
def test_plus_copies_twins_and_averages_the_rest(stage, lost, expected) -> None:
    assert plan(situation(PLUS, 6, lost), stage) == expected


@pytest.mark.parametrize("stage", [1, 2])
def test_a_pair_that_is_lost_together_is_refused(stage) -> None:
    refused = plan(situation(PLUS, 6, {1, 2}), stage)
    assert isinstance(refused, Refuse)
    assert f"neighbours {'2' if stage == 1 else '1'} have none" in refused.reason


@pytest.mark.parametrize("stage", [1, 6])
def test_plain_checkfree_cannot_restore_the_ends(stage) -> None:
    refused = plan(situation(CHECKFREE, 6, {stage}), stage)
    assert isinstance(refused, Refuse)
    assert "only checkfree_plus" in refused.reason


def test_without_a_method_nothing_is_rebuilt_but_from_a_checkpoint() -> None:
    refused = plan(situation(NONE, 6, {3}), 3)
    assert isinstance(refused, Refuse)
    assert "sets no recovery.method" in refused.reason
    assert plan(situation(NONE, 6, {3}, {3}), 3) == FromCheckpoint(3, "c3", 3)


def test_stage_0_comes_from_a_shared_copy_only_if_the_manifest_says_so() -> None:
    copies = [Holding("end", (7,))]
    for recovery, expected in ((PLUS, Refuse), (RecoverySpec(share_ends=True), FromEnds)):
        given = Situation(recovery, 4, {0: [Holding("empty")]}, ends=copies)
        assert isinstance(plan(given, 0), expected)
    assert plan(Situation(PLUS, 4, {}, {0: copies}), 0) == FromCheckpoint(0, "end", 7)


@given(
    st.sampled_from([NONE, CHECKFREE, PLUS]),
    st.integers(4, 8),
    st.sets(st.integers(1, 8)),
    st.sets(st.integers(1, 8)),
)
def test_nothing_is_ever_taken_from_an_empty_stage(recovery, num_stages, lost, kept) -> None:
    given = situation(recovery, num_stages, lost, kept)
    for stage in range(1, num_stages + 1):
        chosen = plan(given, stage)
        sources = {
            Average: lambda p: {p.below, p.above},
            CopyTwin: lambda p: {p.twin},
            Replicate: lambda p: {p.stage},
        }.get(type(chosen), lambda _: set())(chosen)
        assert not sources & lost
        assert isinstance(chosen, Replicate) == (stage not in lost)
        assert not isinstance(chosen, Refuse) or stage not in kept


@pytest.mark.parametrize("pair", [(k, k + 1) for k in range(1, 6)])
def test_two_adjacent_stages_fall_back_to_their_checkpoints(pair) -> None:
    for stage in pair:
        with_disk = plan(situation(CHECKFREE, 6, set(pair), set(pair)), stage)
        assert with_disk == FromCheckpoint(stage, f"c{stage}", 3)
        assert isinstance(plan(situation(CHECKFREE, 6, set(pair)), stage), Refuse)


# --- weights ---------------------------------------------------------------------------------


@given(NORMS, NORMS, st.sampled_from(["sq", "l2"]))
def test_the_weight_follows_the_norms(below, above, mode) -> None:
    power = 2 if mode == "sq" else 1
    expected = above**power / (below**power + above**power)
    assert weight_above(below, above, mode) == pytest.approx(expected)


@given(NORMS, NORMS, st.integers(-8, 8), st.sampled_from(["sq", "l2"]))
def test_the_weight_does_not_change_when_both_norms_are_scaled(below, above, power, mode) -> None:
    assert weight_above(below * 2.0**power, above * 2.0**power, mode) == weight_above(
        below, above, mode
    )


def test_one_neighbour_alone_counts_whole() -> None:
    assert weight_above(1.0, 0.0) == 0.0
    assert weight_above(0.0, 1.0, "l2") == 1.0


@pytest.mark.parametrize("norm", [None, math.nan, math.inf, -1.0, 1e200])
def test_norms_that_say_nothing_weigh_the_same(norm) -> None:
    assert weight_above(norm, 2.0) == weight_above(2.0, norm) == 0.5
    assert weight_above(0.0, 0.0) == weight_above(1e-7, 1e-9) == 0.5
    assert weight_above(1.0, 9.0, "uniform") == 0.5


# --- order -----------------------------------------------------------------------------------


@given(st.integers(1, 64))
def test_half_of_the_slots_are_swapped(quota) -> None:
    swapped = [slot for slot in range(quota) if is_swapped(PLUS, slot)]
    assert len(swapped) == num_swapped(PLUS, quota) == quota // 2
    assert num_swapped(CHECKFREE, quota) == 0


@given(st.integers(4, 12), st.integers(0, 40))
def test_each_stage_is_passed_once_and_pairs_are_swapped(num_stages, slot) -> None:
    order = stage_order(PLUS, num_stages, slot)
    plain = tuple(range(1, num_stages + 1))
    assert sorted(order) == list(plain)
    assert stage_order(CHECKFREE, num_stages, slot) == plain == stage_order(PLUS, num_stages)
    if slot % 2:
        assert order[:2] == (2, 1)
        assert order[-2:] == (num_stages, num_stages - 1)
        assert order[2:-2] == plain[2:-2]
    else:
        assert order == plain


def test_twins_are_each_others() -> None:
    assert [twin_of(PLUS, 5, k) for k in range(1, 6)] == [2, 1, None, 5, 4]
    assert {twin_of(CHECKFREE, 5, k) for k in range(1, 6)} == {None}


# --- the manifest ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "method", "says"),
    [
        (2, "checkfree", "at least 3 stages"),
        (3, "checkfree_plus", "at least 4 stages"),
        ([2, 2, 1, 1], "checkfree", "equally many"),
    ],
)
def test_a_manifest_whose_stages_cannot_be_rebuilt_is_refused(stages, method, says) -> None:
    with pytest.raises(ConfigError, match=says):
        manifest(model__layers=6, pipeline__stages=stages, recovery__method=method)


def test_recovery_is_part_of_the_swarms_name() -> None:
    kinds = [
        manifest(model__layers=8, pipeline__stages=4, **{f"recovery__{name}": value})
        for name, value in (
            ("method", "none"), ("method", "checkfree"), ("method", "checkfree_plus"),
            ("share_ends", True), ("omega_mode", "l2"), ("lr_scale", 1.2),
        )
    ]  # fmt: skip
    assert all(a.swarm_id != b.swarm_id for a, b in combinations(kinds, 2))
    assert kinds[0].swarm_id == manifest(model__layers=8, pipeline__stages=4).swarm_id
