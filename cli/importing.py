"""`shoal import`: a swarm that begins with the weights of a model that is there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cli.foreground import remember
from cli.interrupts import Interrupts
from cli.options import JsonOption, StateOption
from cli.output import say
from cli.recipe import ImportedRecipe, commented
from cli.swarm import keep_manifest, refuse_trained, tell_created
from node.identity import load_key, new_key, refuse_in_use
from node.paths import StatePaths, state_paths
from protocol.errors import ConfigError
from protocol.manifest import sign

_INTERRUPTED = 130
_DEFAULT = ImportedRecipe()


def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A Llama as `transformers` saves it.", file_okay=False),
    ],
    file: Annotated[Path, typer.Argument(metavar="MANIFEST.toml", help="Written.")],
    name: Annotated[str, typer.Option(help="What people call the swarm.")] = _DEFAULT.name,
    stages: Annotated[int, typer.Option(help="Equal parts of the model.")] = _DEFAULT.stages,
    context: Annotated[
        int | None, typer.Option(help="Tokens per sequence; by default the model's most.", min=1)
    ] = None,
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
    seed: Annotated[int, typer.Option(help="Seed of the data.")] = _DEFAULT.seed,
    wire_dtype: Annotated[
        str, typer.Option(help="How activations cross: float32 or bfloat16.")
    ] = _DEFAULT.wire_dtype,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the manifest of a swarm that begins with a model of Hugging Face's, and its weights."""
    from node.importing import keep_weights, read_shape, written_weights

    paths = state_paths(state)
    refuse_in_use(paths)
    if file.exists():
        raise ConfigError(f"{file} is there already", "Name another file.")
    key = load_key(paths.key) if paths.key.exists() else new_key()
    imported = read_shape(folder)
    recipe = ImportedRecipe(
        name=name, stages=stages, holders=holders, data_nodes=data_nodes, steps=steps, quota=quota,
        microbatch=microbatch, learning_rate=learning_rate, seed=seed, wire_dtype=wire_dtype,
        model={**imported.model, **({"context": context} if context else {})},
    )  # fmt: skip
    bare = recipe.manifest((key.peer_id,))
    refuse_trained(paths, bare)
    with Interrupts():
        try:
            with written_weights(paths, folder, bare, imported, say):
                whole = replace(recipe, initial=imported.initial)
                signed = sign(whole.manifest((key.peer_id,)), key)
                keep_manifest(paths, key, file, commented(signed))
                keep_weights(paths, imported)
        except KeyboardInterrupt:
            say("\ninterrupted; nothing was written")
            raise typer.Exit(_INTERRUPTED) from None
    _name_tokenizer(paths, is_file=imported.tokenizer is not None)
    tell_created(file, signed.manifest, f" --state {state}" if state else "", as_json=as_json)


def _name_tokenizer(paths: StatePaths, *, is_file: bool) -> None:
    if is_file:
        remember(paths, {"tokenizer": paths.tokenizer})
        say(f"every data node needs the tokenizer {paths.tokenizer}")
