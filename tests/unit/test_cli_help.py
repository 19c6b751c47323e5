"""Commands and flags are an interface: this list is the promise, changed on purpose alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from cli.main import app, run

NODE = {"--state", "--json"}
LIMITS = {"--device", "--threads", "--memory", "--metrics-port"}
SHAPE = {"--layers", "--width", "--context", "--stages", "--holders", "--steps", "--quota"}
RECIPE = SHAPE | {"--data-nodes", "--microbatch", "--learning-rate", "--seed", "--wire-dtype"}
ROUTED = {
    "--nodes", "--stages", "--data-nodes", "--seed", "--network", "--churn", "--policy",
    "--picture", "--json",
}  # fmt: skip
FLAGS = {
    "": {"--version", "--debug"},
    "demo": RECIPE | {"--data", "--keep", "--json", "--chaos"},
    "join": NODE | LIMITS | {"--role", "--stage", "--data", "--no-retry"},
    "status": NODE,
    "peers": NODE,
    "leave": NODE,
    "doctor": NODE,
    "generate": NODE | {"--max-tokens", "--temperature", "--seed"},
    "export": NODE | {"--format"},
    "import": NODE | (RECIPE - {"--layers", "--width"}) | {"--name"},
    "swarm": set(),
    "swarm create": NODE | RECIPE | {"--name", "--heads", "--recovery"},
    "swarm run": NODE | LIMITS | {"--data"},
    "simulate": set(),
    "simulate routing": ROUTED | {"--ticks", "--burst", "--loss", "--paper-form", "--save-network"},
    "simulate training": ROUTED | {"--steps", "--microbatches"},
    "identity": set(),
    "identity show": NODE,
    "config": set(),
    "config show": NODE | {"--origin"},
}


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each command's path and the command."""
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def flags(command: Any) -> set[str]:
    """Return the options of a command."""
    names = {name for parameter in command.params for name in parameter.opts}
    return {name for name in names if name.startswith("--")} - {"--help"}


def test_flags_are_those_of_the_list() -> None:
    found = {path: flags(command) for path, command in commands(typer.main.get_command(app))}
    assert found == FLAGS


@pytest.mark.parametrize("path", FLAGS)
def test_help_explains_every_option(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*path.split(), "--help"]) == 0
    assert "Usage: shoal" in capsys.readouterr().out
    command = dict(commands(typer.main.get_command(app)))[path]
    assert command.help
    assert [p.name for p in command.params if not getattr(p, "help", None)] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal ")


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fly"]) == 2
    assert capsys.readouterr().err.startswith("error[config]: no such command 'fly'\nremedy: See ")


def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["swarm"]) == 2
    told = capsys.readouterr()
    assert "Usage: shoal swarm" in told.out
    assert told.err == ""
