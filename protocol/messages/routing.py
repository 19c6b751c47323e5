"""The messages of the flow router (GWTF): small, every list and field bounded, healed if lost.

An edge is one unit of flow across one link; (upstream end, ``edge_id``) names it. Costs are
seconds; a cost from the source that is None says that the flow does not reach its source yet.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from protocol.messages.base import Count, Message, Peer, Stage

MAX_EDGES = 512  # of one message: units of flow between two nodes
MAX_OFFERS = 64  # data nodes that one message speaks of
MAX_SPARE = 16  # units that one offer prices

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Delta = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
EdgeId = Annotated[int, Field(ge=0, lt=2**53)]
EdgeIds = Annotated[tuple[EdgeId, ...], Field(max_length=MAX_EDGES)]
Prices = Annotated[tuple[Seconds, ...], Field(max_length=MAX_SPARE)]
Offer = tuple[Peer, Prices]
Offers = Annotated[tuple[Offer, ...], Field(max_length=MAX_OFFERS)]


class RoutingMessage(Message):
    """What every message of the router carries; routes outlive steps, so ``step`` is 0."""

    step: Count = 0


class FlowIntroduce(RoutingMessage):
    """To a peer that I may use: my stage, what a microbatch costs here; send me your news."""

    kind: Literal["flow_introduce"] = "flow_introduce"
    stage: Stage
    compute_s: Seconds
    capacity: Count
    wants_news: bool


class FlowOffers(RoutingMessage):
    """To those who may send to me: units of flow that wait for a taker.

    For each data node the prices (cost to the sink) of the cheapest of them, ascending.
    """

    kind: Literal["flow_offers"] = "flow_offers"
    stage: Stage
    compute_s: Seconds
    offers: Offers


class FlowRequest(RoutingMessage):
    """Upstream -> downstream: let me use these units; ``edges`` lists id, quote, cost from source.

    A quote is the highest cost to the sink that the sender takes.
    """

    kind: Literal["flow_request"] = "flow_request"
    target: Peer
    link_cost_s: Seconds
    edges: Annotated[
        tuple[tuple[EdgeId, Seconds, Seconds | None], ...], Field(max_length=MAX_SPARE)
    ]


class FlowAnswer(RoutingMessage):
    """Downstream -> upstream: accepted edges with their cost to the sink; refused; fresh prices."""

    kind: Literal["flow_answer"] = "flow_answer"
    target: Peer
    accepted: Annotated[tuple[tuple[EdgeId, Seconds], ...], Field(max_length=MAX_SPARE)]
    refused: Annotated[tuple[EdgeId, ...], Field(max_length=MAX_SPARE)]
    offers: Offers


class FlowCosts(RoutingMessage):
    """New costs of shared edges: to the sink (told upstream), from the source (told downstream)."""

    kind: Literal["flow_costs"] = "flow_costs"
    to_sink: Annotated[tuple[tuple[EdgeId, Seconds], ...], Field(max_length=MAX_EDGES)] = ()
    from_source: Annotated[
        tuple[tuple[EdgeId, Seconds | None, Seconds], ...], Field(max_length=MAX_EDGES)
    ] = ()


class FlowCheck(RoutingMessage):
    """Anti-entropy: the edges that the sender believes to share, as upstream and downstream end."""

    kind: Literal["flow_check"] = "flow_check"
    outs: EdgeIds
    ins: EdgeIds


class FlowRelease(RoutingMessage):
    """Edges that end: ``cancelled`` by the upstream end, ``pushed_back`` by the downstream one."""

    kind: Literal["flow_release"] = "flow_release"
    cancelled: EdgeIds = ()
    pushed_back: EdgeIds = ()


ROUTING_MESSAGES: tuple[type[RoutingMessage], ...] = (
    FlowIntroduce, FlowOffers, FlowRequest, FlowAnswer, FlowCosts, FlowCheck, FlowRelease,
)  # fmt: skip
