"""Which holder a microbatch goes to next: the Router interface and a load-aware choice."""

from protocol.routing.flow_node import Costs, FlowEdge, FlowNode, RoutingSettings, Send
from protocol.routing.load_aware import LoadAwareRouter
from protocol.routing.router import Router

__all__ = [
    "Costs",
    "FlowEdge",
    "FlowNode",
    "LoadAwareRouter",
    "Router",
    "RoutingSettings",
    "Send",
]
