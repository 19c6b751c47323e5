"""What `shoal status` shows a person."""

from __future__ import annotations

from cli.inspection import _status_facts
from node.metrics import Metrics
from node.status import NodeStatus

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
