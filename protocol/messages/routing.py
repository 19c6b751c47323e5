"""The messages of the flow router (GWTF): small, every list and field bounded, healed if lost.

An edge is one unit of flow across one link; (upstream end, ``edge_id``) names it. Costs are
seconds; a cost from the source that is None says that the flow does not reach its source yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from protocol.keys import PeerId
from protocol.messages.base import Count, Message, Peer, Stage

MAX_EDGES = 512  # of one message: units of flow between two nodes
MAX_OFFERS = 64  # data nodes that one message speaks of
MAX_SPARE = 16  # units that one offer prices
MAX_HOPS = 64  # vertices of a label
MAX_LABELS = 8  # of one message
MAX_UNITS = 64  # of one state
MAX_MET = 4  # flows of other data nodes that one message compares

# Nobody may say more, nor make others say it who add to what they heard.
MOST_S = 1e9

Seconds = Annotated[float, Field(ge=0, le=MOST_S, allow_inf_nan=False)]
Delta = Annotated[float, Field(ge=-MOST_S, le=MOST_S, allow_inf_nan=False)]
EdgeId = Annotated[int, Field(ge=0, lt=2**53)]
ToSink = Annotated[tuple[tuple[EdgeId, Seconds], ...], Field(max_length=MAX_EDGES)]
FromSource = Annotated[
    tuple[tuple[EdgeId, Seconds | None, Seconds], ...], Field(max_length=MAX_EDGES)
]
EdgeIds = Annotated[tuple[EdgeId, ...], Field(max_length=MAX_EDGES)]
Prices = Annotated[tuple[Seconds, ...], Field(max_length=MAX_SPARE)]
Offer = tuple[Peer, Prices]
Offers = Annotated[tuple[Offer, ...], Field(max_length=MAX_OFFERS)]
# A vertex of the residual network: a peer's in side or (True) out side.
Vertex = tuple[PeerId, bool]
# Peer, is_out, id of the edge that the arc from here on gives up (else 0), label from here on.
Hop = tuple[Peer, bool, EdgeId, Delta]
HopPath = Annotated[tuple[Hop, ...], Field(max_length=MAX_HOPS)]
LabelKey = tuple[PeerId, bool, bool]  # target, is rooted at the sink, is of the out side
# Target; the peer before, edge id and link cost; the peer after, edge id and link cost.
Unit = tuple[Peer, Peer, EdgeId, Seconds, Peer, EdgeId, Seconds]
Leg = tuple[Peer, EdgeId, Seconds]  # downstream end of a flow's link, edge id, link cost
Legs = Annotated[tuple[Leg, ...], Field(min_length=1, max_length=MAX_HOPS)]
CrossPrices = Annotated[tuple[Delta | None, ...], Field(max_length=MAX_HOPS)]
Change = tuple[bool, Peer, Peer, Peer, EdgeId]  # is_add, upstream, downstream, target, edge id
Changes = Annotated[tuple[Change, ...], Field(min_length=1, max_length=MAX_HOPS)]


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
    """New costs of shared edges: to the sink (told upstream), from the source (told downstream).

    The latter with the cost of the link.
    """

    kind: Literal["flow_costs"] = "flow_costs"
    to_sink: ToSink = ()
    from_source: FromSource = ()


class FlowCheck(RoutingMessage):
    """Anti-entropy: all edges that the sender believes to share, with what it last told of them."""

    kind: Literal["flow_check"] = "flow_check"
    to_sink: ToSink
    from_source: FromSource


class FlowRelease(RoutingMessage):
    """Edges that end: ``cancelled`` by the upstream end, ``pushed_back`` by the downstream one."""

    kind: Literal["flow_release"] = "flow_release"
    cancelled: EdgeIds = ()
    pushed_back: EdgeIds = ()


@dataclass(frozen=True, slots=True)
class Label:
    """A label as its readers use it; ``at`` finds a vertex's place in the path."""

    cost_s: float
    path: tuple[Hop, ...]
    at: dict[Vertex, int]


class FlowLabels(RoutingMessage):
    """Residual path-vector labels of one side of the sender that changed (spec 1.3).

    Each is target, whether it is rooted at the sink, path; an empty path withdraws it.
    ``is_all``: the side has no other labels, whatever was said before.
    """

    kind: Literal["flow_labels"] = "flow_labels"
    is_out: bool
    is_all: bool = False
    labels: Annotated[tuple[tuple[Peer, bool, HopPath], ...], Field(max_length=MAX_LABELS)]

    @cached_property
    def parsed(self) -> dict[LabelKey, Label | None]:
        """The labels by target, root and side."""
        return {
            (target, is_rooted, self.is_out): make_label(path)
            for target, is_rooted, path in self.labels
        }


def make_label(path: tuple[Hop, ...]) -> Label | None:
    """Index a path; None if it is empty."""
    if not path:
        return None
    return Label(path[0][3], path, {(hop[0], hop[1]): i for i, hop in enumerate(path)})


class FlowState(RoutingMessage):
    """To a peer of my own stage: the units that I pass on, so that it can find a better exchange.

    ``reach`` gives what links to peers of the next stage cost me. ``is_leaving``: take them over.
    """

    kind: Literal["flow_state"] = "flow_state"
    units: Annotated[tuple[Unit, ...], Field(max_length=MAX_UNITS)]
    reach: Annotated[tuple[tuple[Peer, Seconds], ...], Field(max_length=MAX_UNITS)]
    num_free: Count
    is_leaving: bool = False


class FlowWalk(RoutingMessage):
    """Along a flow, from and to its data node: which links it takes.

    ``met`` are other data nodes' flows, ``prices`` what it costs for each of them and each leg if
    both cross there (None: unknown); that of the last leg lacks the link that ends at the receiver.
    """

    kind: Literal["flow_walk"] = "flow_walk"
    edge_id: EdgeId
    legs: Legs
    met: Annotated[tuple[Legs, ...], Field(max_length=MAX_MET)] = ()
    prices: Annotated[tuple[CrossPrices, ...], Field(max_length=MAX_MET)] = ()


class FlowMeet(RoutingMessage):
    """Data node -> data node: these are flows of mine; do they cross any of yours?"""

    kind: Literal["flow_meet"] = "flow_meet"
    flows: Annotated[tuple[Legs, ...], Field(max_length=MAX_MET)]


class TokenPrepare(RoutingMessage):
    """Initiator -> everyone whose edges a token changes: lock them, and say what it costs.

    Each change: whether an edge is added, upstream end, downstream end, target, edge id (of an
    edge that ends; 0 if added).
    """

    kind: Literal["token_prepare"] = "token_prepare"
    token: EdgeId
    changes: Changes


class TokenVote(RoutingMessage):
    """Answer to TokenPrepare: for each change of which the sender is the upstream end its index,
    edge id and cost; not ok if it cannot be done.
    """

    kind: Literal["token_vote"] = "token_vote"
    token: EdgeId
    is_ok: bool
    priced: Annotated[tuple[tuple[EdgeId, EdgeId, Delta], ...], Field(max_length=MAX_HOPS)] = ()


class TokenEnd(RoutingMessage):
    """Initiator -> participants: apply the changes, with these edge ids and costs, or abort."""

    kind: Literal["token_end"] = "token_end"
    token: EdgeId
    is_applied: bool
    priced: Annotated[tuple[tuple[EdgeId, EdgeId, Delta], ...], Field(max_length=MAX_HOPS)] = ()


class TokenAsk(RoutingMessage):
    """Participant -> initiator: how did it end?"""

    kind: Literal["token_ask"] = "token_ask"
    token: EdgeId


ROUTING_MESSAGES: tuple[type[RoutingMessage], ...] = (
    FlowIntroduce, FlowOffers, FlowRequest, FlowAnswer, FlowCosts, FlowCheck, FlowRelease,
    FlowLabels, TokenPrepare, TokenVote, TokenEnd, TokenAsk, FlowState,
    FlowWalk, FlowMeet,
)  # fmt: skip
