"""The organiser's commands: `shoal swarm create` and `shoal swarm run`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from cli.foreground import announce_key, remember, run_daemon
from cli.membership import swarm_of
from cli.options import (
    DataOption,
    DeviceOption,
    JsonOption,
    MemoryOption,
    MetricsPortOption,
    StateOption,
    ThreadsOption,
)
from cli.output import emit, emit_json, facts, say
from cli.recipe import Recipe, commented, num_parameters, resigned
from node.files import all_or_none, replace_text
from node.identity import keep_key, load_key, new_key, refuse_in_use
from node.paths import StatePaths, state_paths
from protocol.errors import ConfigError
from protocol.keys import NodeKey
from protocol.manifest import Manifest, SignedManifest, sign

app = typer.Typer(help="Create and run a swarm of your own.", no_args_is_help=True)
_DEFAULT = Recipe()


@app.command()
def create(
    context_: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="MANIFEST.toml", help="Written, or signed if it exists.")
    ],
    name: Annotated[str, typer.Option(help="What people call the swarm.")] = _DEFAULT.name,
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = _DEFAULT.layers,
    width: Annotated[int, typer.Option(help="Channels between layers.")] = _DEFAULT.width,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _DEFAULT.heads,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.context,
    stages: Annotated[int, typer.Option(help="Equal parts of the model.")] = _DEFAULT.stages,
    holders: Annotated[
        int, typer.Option(help="Holders that each stage needs before training starts.")
    ] = _DEFAULT.holders,
    data_nodes: Annotated[
        int, typer.Option(help="Data nodes needed before training starts.")
    ] = _DEFAULT.data_nodes,
    steps: Annotated[int, typer.Option(help="Optimiser steps to train.")] = _DEFAULT.steps,
    quota: Annotated[int, typer.Option(help="Microbatches per step.")] = _DEFAULT.quota,
    microbatch: Annotated[
        int, typer.Option(help="Sequences per microbatch.")
    ] = _DEFAULT.microbatch,
    learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate of AdamW.")
    ] = _DEFAULT.learning_rate,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = _DEFAULT.seed,
    wire_dtype: Annotated[
        str, typer.Option(help="How activations cross: float32 or bfloat16.")
    ] = _DEFAULT.wire_dtype,
    recovery: Annotated[
        str, typer.Option(help="A stage that lost all holders: none (wait), or checkfree.")
    ] = _DEFAULT.recovery,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the manifest of a small byte-level model, ready to edit; or sign an edited one."""
    paths = state_paths(state)
    refuse_in_use(paths)
    key = load_key(paths.key) if paths.key.exists() else new_key()
    given = _given(context_)
    if file.exists():
        if given:
            raise ConfigError(
                f"{file} exists, so --{given[0].replace('_', '-')} has no effect",
                "Edit the file and sign it without options, or name another file.",
            )
        text, signed = resigned(_read(file), key)
    else:
        choices = {choice.name: context_.params[choice.name] for choice in fields(Recipe)}
        text, signed = _written(Recipe(**choices), key)
    refuse_trained(paths, signed.manifest)
    keep_manifest(paths, key, file, text)
    tell_created(file, signed.manifest, f" --state {state}" if state else "", as_json=as_json)


def keep_manifest(paths: StatePaths, key: NodeKey, file: Path, text: str) -> None:
    """Write the key, if it is new, and the manifest where it is looked for; or none of them."""
    is_new, was_there = not paths.key.exists(), paths.root.exists()
    try:
        with all_or_none(file, paths.manifest, *([paths.key] if is_new else [])):
            replace_text(file, text)
            if is_new:
                keep_key(paths, key)
            replace_text(paths.manifest, text)
    finally:
        if not was_there and not paths.manifest.exists():
            with suppress(OSError):
                paths.root.rmdir()
    if is_new:
        announce_key(paths, key)


def _given(context: typer.Context) -> list[str]:
    """Return the names of the recipe's options that stand on the command line."""
    sources = (
        (choice.name, context.get_parameter_source(choice.name)) for choice in fields(Recipe)
    )
    return [name for name, source in sources if source is not None and source.name != "DEFAULT"]


def _written(recipe: Recipe, key: NodeKey) -> tuple[str, SignedManifest]:
    signed = sign(recipe.manifest((key.peer_id,)), key)
    return commented(signed), signed


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", "Name a TOML file.") from error


def _install(paths: StatePaths, file: Path) -> None:
    """Make the signed manifest in ``file`` this node's; raise ConfigError."""
    text = _read(file)
    refuse_trained(paths, SignedManifest.from_toml(text).verify())
    paths.create()
    replace_text(paths.manifest, text)


def refuse_trained(paths: StatePaths, manifest: Manifest) -> None:
    """Raise ConfigError if another swarm's training began in this state directory."""
    if paths.steps.exists() and swarm_of(paths) not in (None, manifest.swarm_id):
        raise ConfigError(
            f"{paths.root} holds the training of another swarm",
            "Give the new swarm a directory of its own with --state.",
        )


def tell_created(file: Path, manifest: Manifest, option: str, *, as_json: bool) -> None:
    """Print what the swarm is, and what to do next."""
    known: dict[str, object] = {
        "swarm": manifest.swarm_id,
        "name": manifest.name,
        "manifest": str(file),
        "organiser": manifest.organiser,
        "parameters": num_parameters(manifest),
        "stages": manifest.num_stages,
        "steps": manifest.training.steps,
    }
    if as_json:
        emit_json(known)
        return
    emit(facts(known))
    say(
        "\nnext: edit the manifest and sign it with the same command, or run the swarm:\n"
        f"  shoal swarm run{option}"
    )


@app.command()
def run(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[MANIFEST.toml]", help="By default the one created last."),
    ] = None,
    data: DataOption = None,
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    memory: MemoryOption = None,
    metrics_port: MetricsPortOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the organiser's node, data node and seed in one, until Ctrl-C; prints the invite."""
    paths = state_paths(state)
    refuse_in_use(paths)
    if file is not None:
        _install(paths, file)
    if swarm_of(paths) is None:
        raise ConfigError(
            f"{paths.root} has no swarm", "Create one: `shoal swarm create manifest.toml`."
        )
    flags = {
        "role": "organiser",
        "device": device,
        "threads": threads,
        "memory_bytes": memory,
        "metrics_port": metrics_port,
        "data": tuple(path.absolute() for path in data) if data else None,
    }
    _, forget = remember(paths, flags)
    say(f"starting; the node's directory is {paths.root}")
    raise typer.Exit(run_daemon(paths, flags, as_json=as_json, forget=forget))
