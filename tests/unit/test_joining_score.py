"""Where a newcomer goes: the score of GWTF 1.5, and newcomers that come together."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joining_kit import LEASE_S, WALL_S, Board, counts, holder, play, seeker, swarm_of

from protocol.joining import Newcomer, Seeking, Standing, Summaries, choose, rank
from protocol.joining.score import score
from protocol.keys import PeerId
from protocol.records import Claim

ME = PeerId("me")


def newcomer(num_stages: int, capacity: int = 3, **more: object) -> Newcomer:
    return Newcomer(ME, dict.fromkeys(range(1, num_stages + 1), capacity), **more)


def claim(stage: int, epoch: int = 1, **more: object) -> Claim:
    return Claim(stage=stage, epoch=epoch, expires_at=WALL_S + LEASE_S, **more)


# --- the score -----------------------------------------------------------------------------


def test_gained_flows_are_those_of_the_narrowest_stage_and_of_the_demand() -> None:
    summaries = Summaries.of(3, swarm_of(2, 3, 4))
    assert summaries.flow == 6
    assert score(summaries, 1, 2) == (False, 2, -6, 0.0)
    assert score(summaries, 1, 20) == (False, 3, -6, 0.0)  # the next bottleneck: 9
    assert score(summaries, 2, 20) == (False, 0, -9, 0.0)
    little = Summaries.of(3, swarm_of(2, 3, 4, demand=7))
    assert score(little, 1, 20) == (False, 1, -6, 0.0)
    assert score(little, 3, 20) == (False, 0, -7, 0.0)


def test_without_data_nodes_the_stages_alone_limit_the_flow() -> None:
    nodes = [node for node in swarm_of(2, 3) if node.stage]
    assert Summaries.of(2, nodes).flow == 6


def test_a_stage_with_one_holder_comes_before_more_flow() -> None:
    nodes = [*swarm_of(2, 0), holder("big", 2, 50)]
    assert choose(newcomer(2), 2, nodes).stage == 2


def test_of_two_stages_that_need_a_second_holder_the_empty_one_comes_first() -> None:
    assert choose(newcomer(3), 3, swarm_of(1, 0, 1)).stage == 2
    assert choose(newcomer(3), 3, swarm_of(0, 1, 0)).stage == 1


def test_of_two_equally_narrow_stages_one_is_taken_though_alone_it_gains_nothing() -> None:
    """All that limits is as narrow as it was; the crowd must still not gather where it is cheap."""
    nodes = [replace(n, cost_s=9.0 if n.stage == 1 else 1.0) for n in swarm_of(4, 2, 2)]
    near = newcomer(3, link_s=lambda peer: 0.001)
    assert choose(near, 3, nodes).stage in (2, 3)


def test_where_nothing_is_short_the_cheapest_path_counts() -> None:
    nodes = [
        replace(node, cost_s={0: None, 1: 0.5, 2: 0.3}[node.stage])
        for node in swarm_of(2, 2, demand=4)
    ]
    near_data = newcomer(2, link_s=lambda peer: 0.01 if peer == "data" else 0.4)
    near_two = newcomer(2, link_s=lambda peer: 0.4 if peer == "data" else 0.01)
    assert choose(near_data, 2, nodes).stage == 2  # 0.3 falls to 0.01
    assert choose(near_two, 2, nodes).stage == 1  # 0.5 falls to 0.31, and 0.3 does not to 0.4
    assert choose(newcomer(2), 2, nodes).stage == 1  # nothing is measured


def test_only_stages_that_fit_are_taken() -> None:
    assert choose(Newcomer(ME, {1: 3, 3: 3}), 3, swarm_of(3, 0, 2)).stage == 3


# --- claims --------------------------------------------------------------------------------


def ranked(*names: str) -> list[str]:
    return sorted(names, key=lambda name: rank(PeerId(name), 1))


def test_of_two_that_claim_a_stage_the_higher_rank_gives_way() -> None:
    first, second = ranked("a", "b")
    nodes = swarm_of(2, 1, 2)

    def rival(name: str) -> Standing:
        return Standing(PeerId(name), -1, 9, claim=claim(2))

    flows = {1: 3, 2: 3, 3: 3}
    kept = choose(Newcomer(PeerId(first), flows), 3, [*nodes, rival(second)], claim(2)).stage
    left = choose(Newcomer(PeerId(second), flows), 3, [*nodes, rival(first)], claim(2)).stage
    assert kept == 2
    assert left == 1


def test_a_claim_that_is_needed_as_much_is_kept() -> None:
    assert choose(newcomer(4), 4, swarm_of(3, 2, 2, 2), claim(4)).stage == 4
    assert choose(newcomer(4), 4, swarm_of(2, 2, 2, 3), claim(4)).stage == 1


def test_a_rival_that_already_serves_its_stage_counts_whatever_its_rank() -> None:
    nodes = [*swarm_of(2, 1, 2), holder("settled", 2, 9)]
    assert choose(newcomer(3), 3, nodes, claim(2)).stage == 1


def test_a_mover_counts_where_its_firm_claim_leads() -> None:
    mover = holder("mover", 1, claim=claim(2, is_firm=True))
    assert choose(newcomer(2), 2, [*swarm_of(1, 1), mover]).stage == 1
    unsure = holder("mover", 1, claim=claim(2))
    assert choose(newcomer(2), 2, [*swarm_of(1, 1), unsure]).stage == 2


def test_who_loses_again_and_again_takes_what_it_claimed() -> None:
    seeking = Seeking(newcomer(2), 2, LEASE_S)
    looks = 0
    while seeking.look(swarm_of(*((0, 1) if looks % 2 else (1, 0))), WALL_S) is None:
        looks += 1
        assert looks < 20
    assert looks == 8


# --- a crowd -------------------------------------------------------------------------------


def one_by_one(nodes: list[Standing], num: int, num_stages: int) -> list[Standing]:
    nodes = list(nodes)
    for n in range(num):
        one = Newcomer(PeerId(f"n{n}"), dict.fromkeys(range(1, num_stages + 1), 3))
        nodes.append(holder(f"n{n}", choose(one, num_stages, nodes).stage))
    return nodes


def together(
    nodes: list[Standing], num: int, num_stages: int, seed: int, *, late_s: float = 0.0
) -> tuple[list[Standing], float]:
    """All come within a quarter of a second; return where they went and how long it took."""
    rng, board = Random(seed), Board(late_s)
    for node in nodes:
        board.write(node, -1e6)
    agents = [(rng.uniform(0, 0.25), seeker(board, f"n{n}", num_stages, rng)) for n in range(num)]
    took_s = play(agents)
    return board.read(PeerId("nobody"), 1e6), took_s


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.2, 0.5]),
)
def test_a_crowd_spreads_as_one_by_one(
    replicas: list[int], num: int, seed: int, late_s: float
) -> None:
    nodes, num_stages = swarm_of(*replicas), len(replicas)
    expected = counts(one_by_one(nodes, num, num_stages), num_stages)
    found, took_s = together(nodes, num, num_stages, seed, late_s=late_s)
    assert sorted(counts(found, num_stages)) == sorted(expected)
    assert took_s < 20


def test_eight_newcomers_of_an_unborn_swarm_leave_no_stage_empty() -> None:
    for seed in range(200):
        found, took_s = together(swarm_of(0, 0, 0, 0), 8, 4, seed)
        assert counts(found, 4) == [2, 2, 2, 2]
        assert took_s < 10


def test_who_vanished_after_its_claim_blocks_nobody() -> None:
    board = Board()
    for node in swarm_of(2, 1, 2):
        board.write(node, -1e6)
    gone = Standing(PeerId("gone"), -1, 3, claim=claim(2))
    board.write(gone, 0.0)
    play([(LEASE_S + 1, seeker(board, "me", 3, Random(0)))])
    assert counts(board.read(PeerId("x"), 1e6), 3)[1] == 2


@pytest.mark.parametrize("expires_in_s", [-1.0, 10_000.0])
def test_a_claim_that_expired_or_lasts_for_ever_is_none(expires_in_s: float) -> None:
    from protocol.joining import is_live

    assert not is_live(Claim(stage=1, epoch=0, expires_at=WALL_S + expires_in_s), WALL_S)
    assert is_live(claim(1), WALL_S)


def test_a_crowd_that_nobody_needs_still_spreads() -> None:
    """All that is wanted is carried: only costs and the stages' sizes tell them apart."""
    nodes = [
        replace(node, cost_s=0.1 * (5 - node.stage) if node.stage else None)
        for node in swarm_of(2, 2, 2, 2, demand=4)
    ]
    for seed in range(20):
        found, took_s = together(nodes, 8, 4, seed)
        assert counts(found, 4) == [4, 4, 4, 4]
        assert took_s < 30
