"""The load-aware choice of the next holder, in a little world of servers with one queue each."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from step_kit import PEERS, decision_of

from protocol.keys import PeerId
from protocol.routing import LoadAwareRouter

A, B, C = PEERS[1:4]
HOLDERS = (A, B, C)


def router_of(rtt_s: dict[PeerId, float] | None = None, step: int = 0) -> LoadAwareRouter:
    router = LoadAwareRouter((rtt_s or {}).get)
    router.on_decision(decision_of([PEERS[:1], HOLDERS], step=step))
    return router


@dataclass
class Servers:
    """Sends ``num`` microbatches with at most ``window`` in flight; a fault comes back at once."""

    seconds: dict[PeerId, float]
    faulty: frozenset[PeerId] = frozenset()
    window: int = 9
    done: Counter[PeerId] = field(default_factory=Counter)
    failed: Counter[PeerId] = field(default_factory=Counter)

    def play(self, router: LoadAwareRouter, num: int) -> Servers:
        now, order = 0.0, count()
        free_at = dict.fromkeys(self.seconds, 0.0)
        in_flight: list[tuple[float, int, PeerId, float]] = []
        while sum(self.done.values()) < num:
            while len(in_flight) < self.window:
                peer = router.choose(1, (), now)
                assert peer is not None
                router.sent(peer, now)
                if peer in self.faulty:
                    back = now + 0.001
                else:
                    back = free_at[peer] = max(now, free_at[peer]) + self.seconds[peer]
                heapq.heappush(in_flight, (back, next(order), peer, now))
            now, _, peer, sent_at = heapq.heappop(in_flight)
            if peer in self.faulty:
                self.failed[peer] += 1
                router.lost(peer, now, is_fault=True)
            else:
                self.done[peer] += 1
                router.returned(peer, now - sent_at, now)
        return self


def test_equals_get_equal_shares() -> None:
    done = Servers(dict.fromkeys(HOLDERS, 1.0)).play(router_of(), 300).done
    assert max(done.values()) - min(done.values()) <= 15


def test_a_slow_holder_gets_less_and_not_nothing() -> None:
    done = Servers({A: 1.0, B: 1.0, C: 4.0}).play(router_of(), 300).done
    assert 0 < done[C] < done[A] / 2
    assert abs(done[A] - done[B]) <= 15


def test_a_holder_that_fails_fast_does_not_look_fast() -> None:
    servers = Servers(dict.fromkeys(HOLDERS, 1.0), frozenset({C})).play(router_of(), 300)
    assert servers.failed[C] < 20  # 150 seconds with two servers; without a bar it would be many
    assert servers.failed[C] > 1  # it is tried again


def test_a_fault_bars_for_a_while_that_doubles_and_a_success_forgives() -> None:
    router = router_of()
    router.lost(A, 0.0, is_fault=True)
    assert router.choose(1, (B,), 1.9) == C
    assert router.choose(1, (B, C), 0.0) == A  # better a barred one than nobody
    assert router.choose(1, (), 2.0) == A  # nobody sent to it yet, so it is as good as the others
    router.lost(A, 2.0, is_fault=True)
    assert router.choose(1, (), 5.9) != A
    assert router.choose(1, (), 6.0) == A
    router.returned(A, 1.0, 6.0)
    router.lost(A, 7.0, is_fault=True)
    assert router._peers[A].barred_until == 9.0


def test_many_faults_do_not_bar_for_ever() -> None:
    router = router_of()
    for _ in range(2000):
        router.lost(A, 0.0, is_fault=True)
    assert router._peers[A].barred_until < 60


def test_a_busy_holder_is_not_at_fault() -> None:
    router = router_of()
    router.sent(A, 0.0)
    router.lost(A, 0.0, is_fault=False)
    assert router._peers[A].barred_until == 0.0
    assert router._peers[A].outstanding == 0


def test_a_near_holder_comes_before_a_far_one() -> None:
    assert router_of({A: 0.3, B: 0.1, C: 0.2}).choose(1, (), 0.0) == B
    assert router_of({A: 0.3, B: 0.1, C: 0.2}).choose(1, (B,), 0.0) == C
    assert router_of().choose(1, HOLDERS, 0.0) is None


def test_a_new_step_starts_with_nothing_outstanding_and_keeps_the_speeds() -> None:
    """What was in flight at the end of a step never comes back."""
    router = router_of()
    for peer, seconds in ((A, 1.0), (B, 2.0), (C, 2.0)):
        router.sent(peer, 0.0)
        router.returned(peer, seconds, 0.0)
    for _ in range(10):
        router.sent(A, 0.0)
    assert router.choose(1, (), 0.0) != A
    router.on_decision(decision_of([PEERS[:1], HOLDERS], step=0, term=2))
    assert router.choose(1, (), 0.0) != A
    router.on_decision(decision_of([PEERS[:1], HOLDERS], step=1, term=3))
    assert router.choose(1, (), 0.0) == A


def test_who_left_is_forgotten() -> None:
    router = router_of()
    router.lost(A, 0.0, is_fault=True)
    router.on_decision(decision_of([PEERS[:1], (B, C)], term=2))
    assert set(router._peers) == set()
    router.on_decision(decision_of([PEERS[:1], HOLDERS], term=3))
    assert router.choose(1, (B, C), 0.0) == A


def test_one_slow_reply_does_not_end_a_peers_work() -> None:
    """It waited behind a neighbour's death; nothing but new work can show that it is fast again."""
    router = router_of()
    for _ in range(8):
        router.sent(A, 0.0)
    for _ in range(8):
        router.returned(A, 0.4, 0.0)
    router.sent(B, 0.0)
    router.returned(B, 60.0, 0.0)
    chosen = []
    for _ in range(16):
        peer = router.choose(1, (C,), 0.0)
        assert peer is not None
        router.sent(peer, 0.0)
        chosen.append(peer)
    assert chosen.count(A) > chosen.count(B) >= 2
