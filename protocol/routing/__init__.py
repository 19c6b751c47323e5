"""Which holder a microbatch goes to next: flows that the nodes agree on, and the Router on them."""

from protocol.routing.costs import MeasuredCosts
from protocol.routing.flow_node import Costs, FlowEdge, FlowNode, RoutingSettings, Send
from protocol.routing.flow_router import FlowReport, FlowRouter, fair_share
from protocol.routing.load_aware import LoadAwareRouter
from protocol.routing.router import Router

__all__ = [
    "Costs",
    "FlowEdge",
    "FlowNode",
    "FlowReport",
    "FlowRouter",
    "LoadAwareRouter",
    "MeasuredCosts",
    "Router",
    "RoutingSettings",
    "Send",
    "fair_share",
]
