"""When a holder may go to another stage, and that a gap nobody has moves one node at most."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joining_kit import LEASE_S, WALL_S, Board, counts, holder, play, swarm_of
from step_kit import PEERS

from protocol.joining import Gap, Standing, Summaries, best_move, may_move, vacancy
from protocol.keys import PeerId
from protocol.messages import Presence
from protocol.records import Claim
from protocol.step.candidate import Candidate
from protocol.step.moves import next_roster


def claim(stage: int, epoch: int = 1, **more: object) -> Claim:
    return Claim(stage=stage, epoch=epoch, expires_at=WALL_S + LEASE_S, **more)


def flows(num_stages: int) -> dict[int, int]:
    return dict.fromkeys(range(1, num_stages + 1), 3)


@pytest.mark.parametrize(
    ("replicas", "moves"),
    [
        ((3, 1), True),
        ((2, 0), False),  # two others must stay
        ((4, 3), False),  # the narrowest becomes no wider
        ((4, 1, 1), False),  # one alone widens nothing
        ((3, 0), True),
    ],
)
def test_the_narrowest_stage_must_gain_and_two_must_stay(
    replicas: tuple[int, ...], moves: bool
) -> None:
    summaries = Summaries.of(len(replicas), swarm_of(*replicas))
    assert may_move(summaries, 3, 1, 2) == moves


@pytest.mark.parametrize(("flows", "moves"), [(9, False), (10, True)])
def test_a_tenth_is_enough_and_less_is_not(flows: int, moves: bool) -> None:
    nodes = [holder("me", 1, flows), *(holder(f"a{n}", 1, 100) for n in range(2))]
    nodes.append(holder("b", 2, 100))
    assert may_move(Summaries.of(2, nodes), flows, 1, 2) == moves


def test_nobody_moves_from_or_to_what_is_no_stage() -> None:
    summaries = Summaries.of(2, swarm_of(4, 1))
    assert not any(may_move(summaries, 3, *way) for way in ((0, 2), (1, 0), (1, 3), (1, 1)))


def test_newcomers_on_their_way_fill_the_gap() -> None:
    others = swarm_of(3, 1)[2:]
    me = holder("h1-0", 1)
    assert best_move(me, 2, others, flows(2)) == 2
    on_its_way = Standing(PeerId("new"), -1, 6, claim=claim(2))
    assert best_move(me, 2, [*others, on_its_way], flows(2)) is None


def test_one_moves_at_a_time_and_stands_a_while_where_it_went() -> None:
    me, others = holder("h1-0", 1), swarm_of(5, 1)[2:]
    moving = replace(others[0], claim=claim(2, is_firm=True))
    arrived = holder("moved", 2, claim=claim(2, is_firm=True))
    assert best_move(me, 2, others, flows(2)) == 2
    assert best_move(me, 2, [moving, *others[1:]], flows(2)) is None
    assert best_move(me, 2, [arrived, *others], flows(2)) is None
    for epoch in range(8):  # whatever the ranks: who was let go is not called back
        late = replace(me, claim=claim(2, epoch))
        assert best_move(late, 2, [moving, *others[1:]], flows(2)) is None


def test_a_gap_must_be_seen_again_and_again() -> None:
    gap = Gap()
    seen = [gap.see(stage) for stage in (2, 2, None, 2, 2, 2, 2, 3)]
    assert seen == [False] * 5 + [True, True, False]


def test_before_the_first_step_an_empty_stage_is_filled_from_one_with_others() -> None:
    me = holder("h1-0", 1)
    assert vacancy(me, 3, swarm_of(2, 0, 1)[2:], flows(3)) == 2
    assert vacancy(me, 3, swarm_of(1, 0, 1)[2:], flows(3)) is None
    taken = Standing(PeerId("new"), -1, 3, claim=claim(2))
    assert vacancy(me, 3, [*swarm_of(2, 0, 1)[2:], taken], flows(3)) is None


# --- many at once --------------------------------------------------------------------------


def mover(board: Board, me: Standing, num_stages: int, rng: Random, hidden: int):
    """A holder that does not see ``hidden``'s holders: claims, looks again, and goes."""
    own: list[Claim | None] = [None]

    def act(now: float) -> float | None:
        others = [
            node for node in board.read(me.peer, now) if not node.peer.startswith(f"h{hidden}")
        ]
        goal = best_move(replace(me, claim=own[0]), num_stages, others, flows(num_stages))
        if own[0] is None and goal is not None:
            own[0] = claim(goal, epoch=7)
            board.write(replace(me, claim=own[0]), now)
            return rng.uniform(1.0, 2.0)
        if goal is not None:
            board.write(replace(me, stage=goal, claim=claim(goal, 7, is_firm=True)), now)
        elif own[0] is not None:
            board.write(me, now)
        return None

    return act


@settings(deadline=None)
@given(st.integers(3, 8), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.5]))
def test_a_gap_that_nobody_has_moves_one_node_at_most(
    num_holders: int, seed: int, late_s: float
) -> None:
    """Stage 3 is well held, and nobody sees its holders; all look within a second."""
    rng, board = Random(seed), Board(late_s)
    nodes = swarm_of(num_holders, num_holders, 4)
    for node in nodes:
        board.write(node, -1e6)
    movers = [node for node in nodes if node.stage in (1, 2)]
    play([(rng.random(), mover(board, node, 3, rng, hidden=3)) for node in movers])
    after = board.read(PeerId("nobody"), 1e6)
    moved = [node for node in after if node.claim is not None and node.claim.is_firm]
    assert len(moved) == 1
    assert min(counts(after, 3)) >= 2


# --- the authority -------------------------------------------------------------------------


def candidate(stage: int, **more: object) -> Candidate:
    return Candidate(Presence(step=0, stage=stage, capacity=4, digest=None, **more), 0.0)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=2), st.data())
def test_however_many_would_move_one_is_let_go_and_two_stay(
    replicas: list[int], data: st.DataObject
) -> None:
    names = iter(PEERS[1:])
    roster = [(PEERS[0],), *(tuple(islice(names, n)) for n in replicas)]
    goals = st.integers(-1, len(replicas))
    known = {
        peer: candidate(stage, moves_to=data.draw(goals))
        for stage, holders in enumerate(roster)
        for peer in holders
    }
    after = next_roster(roster, known, set(known))
    lost = [len(a) - len(b) for a, b in zip(roster, after, strict=True)]
    assert sum(lost) <= 1
    assert all(len(b) >= 2 for b, gone in zip(after, lost, strict=True) if gone)
    assert next_roster(roster, dict(list(known.items())[1:]), set()) == list(roster)


def test_a_wish_that_the_roster_does_not_bear_out_is_refused() -> None:
    roster = [PEERS[0:1], PEERS[1:4], PEERS[4:7]]
    known = {p: candidate(k, moves_to=2 if k == 1 else -1) for k, h in enumerate(roster) for p in h}
    tuples = [tuple(holders) for holders in roster]
    assert next_roster(tuples, known, set(known)) == tuples
    short = [*tuples[:2], tuples[2][:1]]
    assert next_roster(short, known, set()) == [short[0], short[1][1:], short[2]]
    for peer in PEERS[4:7]:
        known[peer] = candidate(2, is_draining=True)
    assert next_roster(tuples, known, set(known))[2] == tuples[2]
