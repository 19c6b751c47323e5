"""The flows through this node, as `shoal status` tells of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from node.status import FlowLink, FlowStatus
from protocol.keys import PeerId
from protocol.routing import FlowEdge, FlowReport


def flow_status(report: FlowReport, now: float) -> FlowStatus:
    """Gather units that share a link; ``now`` is on the clock of ``report.last_change``."""
    changed_at, why = report.last_change or (None, None)
    return FlowStatus(
        incoming=_links(report.inflows),
        outgoing=_links(report.outflows),
        cost_s=report.cost_s,
        rerouted_age_s=None if changed_at is None else now - changed_at,
        rerouted_why=why,
    )


def _links(edges: Iterable[FlowEdge]) -> tuple[FlowLink, ...]:
    units: dict[tuple[PeerId, PeerId], list[FlowEdge]] = defaultdict(list)
    for edge in edges:
        units[edge.peer, edge.target].append(edge)
    return tuple(
        FlowLink(
            peer=peer,
            data_node=data_node,
            units=len(shared),
            link_s=_mean(edge.link_cost_s for edge in shared),
            to_data_node_s=_mean(edge.cost_to_sink_s for edge in shared),
        )
        for (peer, data_node), shared in sorted(units.items())
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)
