"""Metrics, the log and the watchdog: the held list of names, and what they promise."""

from __future__ import annotations

import json
import logging
import re
import stat
from pathlib import Path

import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from node.logs import LOGGER, log_event, logging_to
from node.metrics import MAX_LABEL_VALUES, METRICS, PREFIX, Metrics, markdown_table
from node.watchdog import Progress, watch
from protocol.errors import ConfigError, Unreachable
from protocol.keys import NodeKey

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
EXPOSED = {
    "shoal_bytes_total",
    "shoal_capacity_used",
    "shoal_errors_total",
    "shoal_flow_cost_seconds",
    "shoal_flows_wanted",
    "shoal_flows",
    "shoal_frames_total",
    "shoal_gradient_norm",
    "shoal_clock_offset_seconds",
    "shoal_hops_total",
    "shoal_loop_lag_seconds",
    "shoal_loss",
    "shoal_microbatches_committed_total",
    "shoal_microbatches_recomputed_total",
    "shoal_microbatches_reissued_total",
    "shoal_peers",
    "shoal_pinned_bytes",
    "shoal_pins",
    "shoal_progress_age_seconds",
    "shoal_queue_depth",
    "shoal_path_repairs_total",
    "shoal_paused",
    "shoal_registered",
    "shoal_reroutings_total",
    "shoal_rollbacks_total",
    "shoal_seconds_total",
    "shoal_sidecar_restarts_total",
    "shoal_stages_rebuilt_total",
    "shoal_sidecar_up",
    "shoal_stage",
    "shoal_state_bytes",
    "shoal_step",
    "shoal_terms_total",
    "shoal_tokens_total",
    "shoal_update_norm",
    "shoal_validation_loss",
}


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.exposition().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_names_are_the_held_list() -> None:
    metrics = Metrics()
    for spec in METRICS:
        labels = dict.fromkeys(spec.labels, "x")
        metrics.count(spec.name, **labels) if spec.kind == "counter" else metrics.gauge(
            spec.name, 1, **labels
        )
    assert {name for name, _ in samples(metrics)} == EXPOSED
    assert {spec.exposed for spec in METRICS} == EXPOSED


def test_the_documentation_holds_exactly_the_table() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith("|")]
    assert "\n".join(rows) == markdown_table()


def test_help_and_labels_reach_prometheus() -> None:
    text = Metrics().exposition().decode()
    for spec in METRICS:
        assert f"# HELP {spec.exposed} {spec.help}\n" in text
        assert f"# TYPE {spec.exposed} {spec.kind}\n" in text


def test_counting_and_setting() -> None:
    metrics = Metrics()
    metrics.count("bytes", 10, kind="forward", direction="in")
    metrics.count("bytes", 5, kind="forward", direction="in")
    metrics.count("bytes", 2, kind="backward", direction="in")
    metrics.count("bytes", 1, kind="backward", direction="out")
    metrics.gauge("loss", 2.5)
    assert samples(metrics)["shoal_bytes_total", (("direction", "in"), ("kind", "forward"))] == 15
    assert metrics.value("bytes", direction="in") == 17
    assert metrics.value("bytes") == 18
    assert metrics.value("loss") == 2.5
    assert metrics.value("tokens") == 0


def test_two_nodes_in_one_process_do_not_share_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.count("tokens", 3)
    assert other.value("tokens") == 0


def test_unknown_names_labels_and_kinds_raise() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.count("nonsense")
    with pytest.raises(KeyError):
        metrics.gauge("nonsense", 1)
    with pytest.raises(TypeError):
        metrics.count("loss")
    with pytest.raises(TypeError):
        metrics.gauge("tokens", 1)
    with pytest.raises(ValueError, match="labels"):
        metrics.count("bytes", kind="forward")
    with pytest.raises(ValueError, match="labels"):
        metrics.count("tokens", peer="x")


def test_ids_never_become_labels() -> None:
    metrics = Metrics()
    peer = NodeKey(bytes(32)).peer_id
    metrics.count("frames", kind=peer, direction=peer)
    metrics.count("errors", code=peer)
    assert peer not in metrics.exposition().decode()
    assert metrics.value("frames", kind="other", direction="other") == 1


def test_the_values_of_a_label_are_bounded() -> None:
    metrics = Metrics()
    for number in range(10 * MAX_LABEL_VALUES):
        metrics.gauge("queue_depth", 1, queue=f"queue_{number}")
    kept = [key for key in samples(metrics) if key[0] == f"{PREFIX}queue_depth"]
    assert len(kept) == MAX_LABEL_VALUES + 1


def test_committed_last_hour_forgets_by_the_minute() -> None:
    clock = Clock()
    metrics = Metrics(clock)
    for minute in range(61):
        clock.now = 60.0 * minute
        metrics.count("microbatches_committed", stage="1")
        metrics.count("microbatches_committed", 2, stage="1")
    assert metrics.committed_last_hour == 3 * 60
    assert metrics.value("microbatches_committed") == 3 * 61
    clock.now = 60.0 * 90
    assert metrics.committed_last_hour == 3 * 30
    clock.now = 1e6
    assert metrics.committed_last_hour == 0


def test_the_last_problem_is_remembered() -> None:
    metrics = Metrics()
    assert metrics.last_problem is None
    metrics.problem(Unreachable("seed.example.org is silent"))
    assert metrics.last_problem is not None
    assert (metrics.last_problem.code, metrics.last_problem.text) == (
        "unreachable",
        "seed.example.org is silent",
    )
    metrics.count("errors", code="sidecar")
    assert metrics.last_problem.code == "sidecar"
    assert "p2pd" in metrics.last_problem.text
    metrics.event("weights_saved", path="x")
    assert metrics.last_problem.code == "sidecar"
    metrics.count("errors", code="something_else")
    assert metrics.last_problem.code == "sidecar"
    metrics.count("errors", code="peer_gone")  # peers come and go: that is no problem of ours
    assert metrics.last_problem.code == "sidecar"
    assert metrics.value("errors", code="unreachable") == 1
    assert metrics.value("errors", code="other") == 1


def test_the_log_is_json_of_the_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    metrics = Metrics()
    with logging_to(file, "info", on_stderr=False):
        metrics.event("step_finished", step=3, loss=1.25, peer="a b")
        metrics.problem(ConfigError("bad"))
        LOGGER.debug("unseen")
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["event"], first["step"], first["loss"], first["peer"]) == (
        "step_finished", 3, 1.25, "a b",
    )  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first["time"])
    assert (second["level"], second["code"]) == ("warning", "config")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_stderr_has_key_value_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path / "log.jsonl", "info"):
        log_event("peer_left", {"stage": 2, "reason": "two words"})
    assert re.search(r'info peer_left stage=2 reason="two words"\n', capsys.readouterr().err)


def test_secrets_and_bytes_are_not_logged(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    key = NodeKey(bytes([7]) * 32)
    with logging_to(file, "info", on_stderr=False):
        log_event(
            "key_made", {"key": key, "private_key": "hush", "token": "hush", "data": key.seed}
        )
        log_event("node_named", {"node": key})
    text = file.read_text()
    assert "hush" not in text
    assert key.seed.hex() not in text
    assert "(32 bytes)" in text
    assert key.peer_id in text


def test_the_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.logs.MAX_FILE_BYTES", 1000)
    with logging_to(tmp_path / "log.jsonl", "info", on_stderr=False):
        for number in range(200):
            log_event("something_happened", {"number": number})
    files = list(tmp_path.iterdir())
    assert len(files) == 4
    assert sum(file.stat().st_size for file in files) <= 4 * 1000
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


def test_the_log_lets_go_of_its_handlers(tmp_path: Path) -> None:
    before = list(LOGGER.handlers)
    with logging_to(tmp_path / "log.jsonl", "info"):
        assert LOGGER.handlers != before
    assert LOGGER.handlers == before
    assert LOGGER.propagate
    assert logging.getLogger().handlers is not LOGGER.handlers


async def test_the_watchdog_measures_lag_and_age(autojump_clock: trio.testing.MockClock) -> None:
    metrics, progress = Metrics(), Progress()
    assert progress.age_s is None
    progress.mark()
    with trio.move_on_after(10.2):
        await watch(metrics, progress)
    assert metrics.value("loop_lag_seconds") == 0
    assert metrics.value("progress_age_seconds") == 10
    assert progress.age_s == pytest.approx(10.2)


async def test_a_stalled_loop_is_told(mock_clock: trio.testing.MockClock) -> None:
    metrics = Metrics()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, metrics, Progress())
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(3.5)
        await trio.testing.wait_all_tasks_blocked()
        assert metrics.value("loop_lag_seconds") == 3.0
        nursery.cancel_scope.cancel()


def test_whatever_the_code_counts_is_in_the_table() -> None:
    """An unknown name raises, and only where the thing that it counts happens."""
    counting = re.compile(r"(?:observer|metrics)\.(?:count|gauge)\(\s*\"(\w+)\"")
    root, known = Path(__file__).parents[2], {spec.name for spec in METRICS}
    files = [f for package in ("protocol", "node") for f in (root / package).rglob("*.py")]
    counted = {name for file in files for name in counting.findall(file.read_text())}
    assert len(counted) > 10
    assert counted <= known
