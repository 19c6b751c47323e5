"""The files in docker/ agree with the code and with each other; docker/check.sh runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from source_tree import PACKAGES, ROOT

from cli.main import app
from node.config import NodeConfig
from node.metrics import METRICS, Metrics
from protocol.deadlines import Deadlines

FOLDER = ROOT / "docker"
STAGES = re.split(r"^FROM .*$", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)
NODES = ("organiser", *(f"volunteer-{k}" for k in range(1, 7)))
SETTINGS = {"SHOAL_STATE", *(f"SHOAL_{name.upper()}" for name in NodeConfig.model_fields)}
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "prometheus"}


def instructions(text: str, name: str) -> list[str]:
    """Return what follows an instruction's name, joined over its lines."""
    joined = text.replace("\\\n", " ")
    return [line.partition(" ")[2] for line in joined.splitlines() if line.startswith(f"{name} ")]


def understood(words: list[str]) -> str:
    """Let the command line parse the words without running them; return the command's path."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("shoal", list(words))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)
    return str(context.command_path)


# --- the image -----------------------------------------------------------------------------------


def test_both_stages_stand_on_the_base_that_may_be_replaced() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert instructions(text, "ARG")[0] == "BASE=python:3.11-slim"
    assert [line.partition(" AS ")[0] for line in instructions(text, "FROM")] == ["${BASE}"] * 2


def test_the_compiler_stays_in_the_first_stage() -> None:
    _, build, final = STAGES
    assert "gcc" in build
    assert "libgmp-dev" in build
    assert "gcc" not in final
    assert "libgmp10" in final


@pytest.mark.parametrize("name", ["ENTRYPOINT", "CMD"])
def test_no_shell_stands_between_a_signal_and_the_node(name: str) -> None:
    (words,) = instructions(STAGES[2], name)
    assert isinstance(json.loads(words), list)


def test_the_image_runs_as_nobody_special_and_says_how_it_is() -> None:
    final = STAGES[2]
    assert instructions(final, "USER") == ["shoal"]
    (health,) = instructions(final, "HEALTHCHECK")
    words = json.loads(health.partition("CMD ")[2])
    assert words[0] == "shoal"
    assert understood(words[1:]) == "shoal status"
    (entry,) = instructions(final, "ENTRYPOINT")
    assert json.loads(entry) == ["tini", "--", "shoal"]
    assert instructions(final, "VOLUME") == ["/var/lib/shoal"]
    assert "SHOAL_STATE=/var/lib/shoal" in final


def test_the_image_sets_settings_that_exist() -> None:
    assert set(re.findall(r"SHOAL_\w+", STAGES[2])) <= SETTINGS


def test_the_context_holds_what_the_image_is_made_of() -> None:
    copied = {
        word
        for line in instructions(STAGES[1], "COPY")
        for word in line.split()[:-1]
        if not word.startswith("--")
    }
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    assert set(PACKAGES) <= copied
    assert [name for name in copied if not (ROOT / name).exists()] == []


# --- the compose file ----------------------------------------------------------------------------


def test_every_node_has_a_service_and_a_volume_of_its_own() -> None:
    always = {name for name, service in SERVICES.items() if "profiles" not in service}
    assert always == {*NODES, "create", "prometheus"}
    homes = {name: service["volumes"][0].split(":") for name, service in OURS.items()}
    assert {name: home[0] for name, home in homes.items()} == {
        **{name: name for name in (*NODES, "volunteer-gpu")},
        "create": "organiser",
    }
    assert {home[1] for home in homes.values()} == {"/var/lib/shoal"}
    assert {home[0] for home in homes.values()} | {"invite", "prometheus"} == set(
        COMPOSE["volumes"]
    )


def test_volunteers_get_the_invite_and_cannot_touch_it() -> None:
    for name in OURS:
        if name.startswith("volunteer"):
            assert SERVICES[name]["volumes"][1:] == ["invite:/invite:ro"]
    assert SERVICES["organiser"]["volumes"][1:] == ["invite:/invite"]
    assert Path(SERVICES["organiser"]["environment"]["SHOAL_INVITE_FILE"]).parent.name == "invite"


@pytest.mark.parametrize("name", [name for name in OURS if name != "create"])
def test_commands_are_ours(name: str) -> None:
    path = "shoal swarm run" if name == "organiser" else "shoal join"
    assert understood(SERVICES[name]["command"]) == path


def test_the_shell_that_creates_the_swarm_calls_a_command_of_ours() -> None:
    *_, script = SERVICES["create"]["entrypoint"]
    words = script.partition("exec shoal ")[2].split()
    assert understood(words) == "shoal swarm create"
    assert words[-4:] == ["--holders", "2", "--steps", "1000"]


def test_health_of_the_organiser_asks_a_command_of_ours() -> None:
    kind, script = SERVICES["organiser"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    assert understood(script.partition("&& shoal ")[2].split()) == "shoal status"


@pytest.mark.parametrize("name", OURS)
def test_nodes_may_do_little_on_their_host(name: str) -> None:
    service = OURS[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert "ports" not in service
    assert set(service["environment"]) <= SETTINGS


@pytest.mark.parametrize("name", OURS)
def test_a_node_may_finish_its_step_before_it_is_killed(name: str) -> None:
    grace_s = int(OURS[name]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Deadlines().drain_s + Deadlines().control_s


def test_the_gpu_is_asked_for_by_the_one_that_needs_it() -> None:
    service = SERVICES["volunteer-gpu"]
    assert service["profiles"] == ["gpu"]
    assert service["build"]["args"] == {"TORCH_INDEX": ""}
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert [name for name in SERVICES if "deploy" in SERVICES[name]] == ["volunteer-gpu"]


# --- Prometheus ----------------------------------------------------------------------------------


def test_prometheus_scrapes_all_nodes() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (port,) = re.findall(r"SHOAL_METRICS_PORT=(\d+)", STAGES[2])
    assert job["static_configs"] == [{"targets": [f"{name}:{port}" for name in NODES]}]
    for name in NODES:
        assert SERVICES[name]["environment"]["SHOAL_METRICS_HOST"] == "0.0.0.0"
    mounted = {v.split(":")[0].removeprefix("./") for v in SERVICES["prometheus"]["volumes"]}
    assert {"prometheus.yml", *config["rule_files"]} <= mounted
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]


def test_alerts_ask_for_metrics_that_exist() -> None:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    asked = {name for rule in rules for name in re.findall(r"shoal_\w+", rule["expr"])}
    assert asked
    assert asked <= {spec.exposed for spec in METRICS}
    assert all(rule["annotations"].keys() == {"summary", "remedy"} for rule in rules)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "docker/prometheus.yml"),
        ("test", "rules", "docker/alerts_test.yml"),
        ("check", "metrics"),
    ],
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    metrics = Metrics()
    for spec in METRICS:
        labels = dict.fromkeys(spec.labels, "other")
        if spec.kind == "counter":
            metrics.count(spec.name, **labels)
        else:
            metrics.gauge(spec.name, 1, **labels)
    done = subprocess.run(
        ["promtool", *words],
        cwd=ROOT, input=metrics.exposition(), check=False, capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
