"""What `shoal status` shows a person."""

from __future__ import annotations

from cli.inspection import _status_facts
from node.flows import flow_status
from node.metrics import Metrics
from node.status import NodeStatus
from protocol.routing import FlowEdge, FlowReport

STATUS = NodeStatus(peer_id="p", swarm="s", name="n", role="data", loss=2.0, loss_step=41)


def test_each_loss_is_shown_with_its_step() -> None:
    """Steps are counted from one, as in the demo: step 42 of 60."""
    shown = _status_facts(STATUS)
    assert shown["loss"] == "2.0000 nats per token (step 42)"
    assert shown["validation loss"] == "not known yet"
    validated = STATUS.model_copy(update={"validation_loss": 2.5, "validation_step": 39})
    assert _status_facts(validated)["validation loss"] == "2.5000 nats per token (step 40)"


def test_a_problem_is_shown_with_its_remedy_if_there_is_one() -> None:
    assert "remedy" not in _status_facts(STATUS)
    metrics = Metrics()
    metrics.event("disk_filled", code="resource", cause="the disk is full", hint="Free some.")
    metrics.count("errors", code="resource")
    problem = metrics.last_problem
    shown = _status_facts(STATUS.model_copy(update={"last_problem": problem}))
    assert "[resource] the disk is full" in str(shown["last problem"])
    assert shown["remedy"] == "Free some."
    metrics.count("errors", code="sidecar")
    assert metrics.last_problem is not None
    assert metrics.last_problem.hint is None


def test_flows_are_told_by_link_with_the_last_change_and_why() -> None:
    edges = [FlowEdge("next", "data", number, 0.25, cost) for number, cost in enumerate((0.5, 1.5))]
    report = FlowReport((FlowEdge("before", "data", 7, 0.1, 0.5),), tuple(edges), 1.25, (40.0, "x"))
    flows = flow_status(report, now=100.0)
    (link,) = flows.outgoing
    assert (link.peer, link.units, link.link_s, link.to_data_node_s) == ("next", 2, 0.25, 1.0)
    shown = _status_facts(STATUS.model_copy(update={"flows": flows}))
    assert shown["flows"] == "1 in, 2 out"
    assert shown["cost to data node"] == "1250 ms"
    assert shown["last re-routing"] == "0:01:00 ago: x"


def test_a_node_without_flows_says_so() -> None:
    shown = _status_facts(STATUS)
    assert shown["flows"] == "0 in, 0 out"
    assert shown["cost to data node"] == "no flows yet"
    assert shown["last re-routing"] == "none"


def test_a_stage_is_told_with_the_reason() -> None:
    assert _status_facts(STATUS)["stage"] == "none yet"
    chosen = STATUS.model_copy(update={"stage": 2, "stage_reason": "nobody served it"})
    assert _status_facts(chosen)["stage"] == "2 (nobody served it)"
