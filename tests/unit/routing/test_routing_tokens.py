"""A flow node against peers that say what they like: nothing breaks, nothing is given away."""

from __future__ import annotations

import random

from routing_kit import NodeCosts, peer_name, random_net

from protocol.messages.routing import TokenEnd, TokenPrepare, TokenVote
from protocol.routing.flow_node import FlowNode

NET = random_net(0, 4, 2, (1, 1), (1, 10), demand=1)
DATA, ONE, TWO = peer_name(0, 0), NET.at(1)[0], NET.at(2)[0]


def node() -> FlowNode:
    made = FlowNode(
        ONE, stage=1, num_stages=2, capacity=1, costs=NodeCosts(NET, ONE), rng=random.Random(0)
    )
    made.set_peers(NET.stages, 0.0)
    return made


def through(token: int, down: str = TWO) -> TokenPrepare:
    return TokenPrepare(
        token=token,
        changes=((True, DATA, ONE, DATA, 0), (True, ONE, down, DATA, 0)),
    )


def vote_of(flow_node: FlowNode, message: TokenPrepare) -> TokenVote:
    (vote,) = [s.message for s in flow_node.handle(DATA, message, 1.0) if s.peer == DATA]
    assert isinstance(vote, TokenVote)
    return vote


def test_room_that_one_token_holds_is_refused_to_another() -> None:
    flow_node = node()
    assert vote_of(flow_node, through(1)).is_ok
    assert not vote_of(flow_node, through(2)).is_ok
    flow_node.handle(DATA, TokenEnd(token=1, is_applied=False), 2.0)
    assert vote_of(flow_node, through(3)).is_ok


def test_an_applied_token_adds_its_edges() -> None:
    flow_node = node()
    (own,) = vote_of(flow_node, through(1)).priced
    end = TokenEnd(token=1, is_applied=True, priced=((0, 7, 2.0), own))
    flow_node.handle(DATA, end, 2.0)
    assert [(e.peer, e.edge_id) for e in flow_node.inflows] == [(DATA, 7)]
    assert [(e.peer, e.edge_id) for e in flow_node.outflows] == [(TWO, own[1])]


def test_a_word_without_prices_adds_nothing() -> None:
    flow_node = node()
    assert vote_of(flow_node, through(1)).is_ok
    flow_node.handle(DATA, TokenEnd(token=1, is_applied=True), 2.0)
    assert not flow_node.inflows
    assert not flow_node.outflows


def test_only_the_initiator_ends_a_token() -> None:
    flow_node = node()
    assert vote_of(flow_node, through(1)).is_ok
    flow_node.handle(TWO, TokenEnd(token=1, is_applied=False), 2.0)
    assert not vote_of(flow_node, through(2)).is_ok


def test_edges_to_the_wrong_stage_and_edges_of_others_are_refused() -> None:
    assert not vote_of(node(), through(1, down=NET.at(1)[1])).is_ok
    foreign = TokenPrepare(token=1, changes=((True, TWO, DATA, DATA, 0),))
    assert not vote_of(node(), foreign).is_ok


def test_a_token_whose_word_never_comes_lets_go() -> None:
    flow_node = node()
    assert vote_of(flow_node, through(1)).is_ok
    for tick in range(10):
        flow_node.tick(2.0 + 2 * tick)
    assert vote_of(flow_node, through(2)).is_ok
