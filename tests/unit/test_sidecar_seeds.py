"""Which seeds a side-car calls on: all that it does not know, ever less often, at once if alone."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from node.sidecar.child.seeds import FIRST_PAUSE_S, LAST_PAUSE_S, Seeds

A, B = (f"/ip4/192.0.2.{k}/tcp/4001/p2p/peer{k}" for k in (1, 2))


def test_a_seed_that_answers_does_not_excuse_from_calling_the_other() -> None:
    seeds = Seeds([A, B], Random(0))
    assert seeds.due([], now=0) == [A, B]
    seeds.called(A, answered=True, is_alone=False, now=0)
    seeds.called(B, answered=False, is_alone=False, now=0)
    assert seeds.due(["peer1"], now=FIRST_PAUSE_S) == [B]


def test_a_neighbour_that_is_lost_is_called_at_once() -> None:
    seeds = Seeds([A], Random(0))
    seeds.called(A, answered=True, is_alone=False, now=0)
    assert seeds.due(["peer1"], now=1) == []
    assert seeds.due([], now=2) == [A]


def pauses(is_alone: bool) -> list[float]:
    """How long a seed that never answers is left in peace, call after call."""
    seeds, now, called = Seeds([A], Random(0)), 0.0, [0.0]
    while len(called) < 12:
        seeds.called(A, answered=False, is_alone=is_alone, now=now)
        while not seeds.due([] if is_alone else ["peer2"], now):
            now += 0.5
        called.append(now)
    return [b - a for a, b in pairwise(called)]


def test_a_dead_seed_is_called_ever_less_often() -> None:
    assert pauses(is_alone=False)[0] <= FIRST_PAUSE_S
    assert LAST_PAUSE_S / 2 <= pauses(is_alone=False)[-1] <= LAST_PAUSE_S + 1


def test_a_node_alone_keeps_calling() -> None:
    assert max(pauses(is_alone=True)) <= FIRST_PAUSE_S
