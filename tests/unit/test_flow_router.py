"""A microbatch takes a free unit of a flow, and leaves the plan only where that pays."""

from __future__ import annotations

import random
from collections import Counter

import test_routing
from step_kit import PEERS, decision_of

from protocol.keys import PeerId
from protocol.routing import FlowEdge, FlowRouter, MeasuredCosts, fair_share
from protocol.routing import flow_router as module

D, A, B, C = PEERS[:4]
X = PEERS[4]
HOLDERS = (A, B, C)


class FixedFlows:
    """Stands for a flow node whose flows are given; notes what it is told."""

    def __init__(self, outs: Counter[PeerId]) -> None:
        edges = [peer for peer, num in outs.items() for _ in range(num)]
        self.outflows = tuple(FlowEdge(peer, D, n, 0.1, 0.5) for n, peer in enumerate(edges))
        self.inflows: tuple[FlowEdge, ...] = ()
        self.peers: dict[PeerId, int] = {}
        self.lost: list[PeerId] = []
        self.demand = 0
        self.last_change = (0.0, "test")

    def pairs(self):
        return ()

    def set_peers(self, peers, now):
        self.peers = dict(peers)
        return []

    def lose(self, peer, now):
        self.lost.append(peer)
        return []

    def set_demand(self, demand, now):
        self.demand = demand
        return []

    def tick(self, now):
        return []

    def drain(self, now):
        return []


def router_of(
    *, rooms: dict[PeerId, int] | None = None, **units: int
) -> tuple[FlowRouter, FixedFlows]:
    names = {"a": A, "b": B, "c": C}
    costs = MeasuredCosts(1000, lambda _: None, lambda _: (None, None), lambda: (None, None))
    router = FlowRouter(
        D, costs=costs, rtt_s=lambda _: None, rng=random.Random(0), room_of=(rooms or {}).get
    )
    router.serve(0, 1, 8, 0.0)
    flows = FixedFlows(Counter({names[n]: num for n, num in units.items()}))
    router._node = flows
    router.on_decision(decision_of([(D,), HOLDERS]), 0.0)
    return router, flows


class OnFlows:
    """The router with the calls of ``Servers``, which knows one data node."""

    def __init__(self, router: FlowRouter) -> None:
        self._router = router

    def choose(self, stage, avoid, now):
        return self._router.choose(stage, avoid, now, data_node=D)

    def sent(self, peer, now):
        self._router.sent(peer, now, data_node=D)

    def returned(self, peer, seconds, now):
        self._router.tick(now)
        self._router.returned(peer, seconds, now, data_node=D)

    def lost(self, peer, now, *, is_fault):
        self._router.lost(peer, now, data_node=D, is_fault=is_fault)
        self._router.tick(now)


def test_a_free_unit_comes_before_any_other_holder() -> None:
    router, _ = router_of(b=2)
    assert router.choose(1, (), 0.0, data_node=D) == B


def test_without_a_free_unit_it_goes_elsewhere_and_a_return_frees_one() -> None:
    router, _ = router_of(b=1)
    router.sent(B, 0.0, data_node=D)
    assert router.choose(1, (), 0.0, data_node=D) in (A, C)
    router.returned(B, 1.0, 1.0, data_node=D)
    assert router.choose(1, (), 1.0, data_node=D) == B
    assert router.num_by_flow == 1
    assert router.num_beside == 1


def test_a_new_step_frees_all_units() -> None:
    router, _ = router_of(b=1)
    router.sent(B, 0.0, data_node=D)
    router.on_decision(decision_of([(D,), HOLDERS], step=1, term=2), 1.0)
    assert router.choose(1, (), 1.0, data_node=D) == B


def test_a_holder_that_fails_fast_does_not_keep_its_flows() -> None:
    router, flows = router_of(a=3, b=3, c=3)
    servers = test_routing.Servers(dict.fromkeys(HOLDERS, 1.0), frozenset({C}))
    servers.play(OnFlows(router), 300)
    assert 1 < servers.failed[C] < 20
    assert C in flows.lost


def test_a_slow_holder_gets_no_more_work_than_without_flows() -> None:
    router, _ = router_of(a=3, b=3, c=3)
    done = test_routing.Servers({A: 1.0, B: 1.0, C: 4.0}).play(OnFlows(router), 300).done
    plain = test_routing.Servers({A: 1.0, B: 1.0, C: 4.0}).play(test_routing.router_of(), 300).done
    assert abs(done[C] - plain[C]) <= 5  # no slower than without flows
    assert 0 < done[C] < done[A] / 2


def test_a_slow_holder_with_all_flows_does_not_keep_the_work() -> None:
    router, _ = router_of(c=6)
    servers = test_routing.Servers({A: 1.0, B: 1.0, C: 4.0}, window=3)
    assert servers.play(OnFlows(router), 300).done[C] < 60


def test_the_window_is_the_flows_once_they_have_formed() -> None:
    router, flows = router_of(a=2, b=2)
    decision = decision_of([(D,), HOLDERS])
    assert router.window(decision, 1.0) == flows.demand == 21
    assert router.window(decision, module.FORMING_S + 1) == 4
    one = decision_of([(D,), (A,)])
    assert router.window(one, 1.0) == 7
    router._capacity = 4
    assert router.window(one, 1.0) == 4  # all that it wants, and one more


def test_demand_follows_what_holders_say_that_they_carry() -> None:
    rooms = {A: 2, B: 3}
    router, flows = router_of(rooms=rooms, a=2)
    decision = decision_of([(D,), HOLDERS])
    assert flows.demand == router.window(decision, 1.0) == 2 + 3 + 7
    rooms[C] = 20
    assert router.window(decision, 1.0) == 25
    router.tick(2.0)
    assert flows.demand == 25


def test_the_narrowest_stage_counts_and_data_nodes_share_it() -> None:
    rooms = {A: 9, B: 4, C: 4}
    assert fair_share(decision_of([(D,), (A,), (B, C)]), rooms.__getitem__) == 8
    assert fair_share(decision_of([(D, X), (A,), (B, C)]), rooms.__getitem__) == 4
    assert fair_share(decision_of([(D, X), (A,), (B,)]), {A: 1, B: 1}.__getitem__) == 1
    odd = [fair_share(decision_of([(D, X), (A,)]), {A: 5}.__getitem__, rank) for rank in (0, 1)]
    assert odd == [3, 2]


def test_flows_go_round_who_is_gone_and_strangers_are_not_heard() -> None:
    router, flows = router_of(a=1)
    assert set(flows.peers) == set(HOLDERS)
    router.on_session(A, False, 1.0)
    assert set(flows.peers) == {B, C}
    router.on_session(A, True, 2.0)
    assert set(flows.peers) == set(HOLDERS)
    router.on_session(X, False, 2.0)
    assert router.handle(X, None, 3.0) == []


def test_who_is_in_no_roster_has_no_peers() -> None:
    router, flows = router_of(a=1)
    router.on_decision(decision_of([(X,), HOLDERS], term=2), 1.0)
    assert flows.peers == {}


def test_who_drains_wants_no_more_and_still_sees_who_is_gone() -> None:
    router, flows = router_of(a=1)
    flows.demand = 0
    router.drain(1.0)
    router.on_session(A, False, 2.0)
    assert A in flows.lost
    assert set(flows.peers) == {B, C}
    assert flows.demand == 0


def test_a_stage_that_is_taken_while_draining_takes_no_flows() -> None:
    router, _ = router_of()
    router.drain(1.0)
    router.serve(1, 1, 8, 2.0)
    router.on_decision(decision_of([(X,), (D, A, B)], term=3), 2.0)
    assert router._node._ctx.is_draining
