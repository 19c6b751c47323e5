"""`shoal demo`: a whole swarm on this computer trains a small model, and shows it."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.chaos import CHAOS_STAGES, LEAST_FOR_REBUILDING, Chaos
from cli.interrupts import Interrupts
from cli.options import DataOption, JsonOption
from cli.output import say
from cli.recipe import Recipe
from cli.watch import Watch

if TYPE_CHECKING:
    from cli.live import Progress
    from node.local_swarm import LocalSwarm

_POLL_S = 0.5
_PATIENCE_S = 5.0  # when all nodes leave at once, none has anybody to hand its work to
_INTERRUPTED = 130
_TEMPERATURE = 0.8  # of the sample: a young model repeats itself when it is cold
_DEFAULT = Recipe()


def demo(
    context_: typer.Context,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1)] = _DEFAULT.steps,
    stages: Annotated[int, typer.Option(help="Parts of the model.", min=1)] = _DEFAULT.stages,
    holders: Annotated[int, typer.Option(help="Nodes per stage.", min=1, max=26)] = 2,
    data_nodes: Annotated[int, typer.Option(help="Nodes that feed text.", min=1, max=64)] = 1,
    layers: Annotated[int, typer.Option(help="Transformer layers.", min=1)] = _DEFAULT.layers,
    width: Annotated[int, typer.Option(help="Channels between layers.")] = _DEFAULT.width,
    context: Annotated[int, typer.Option(help="Tokens per sequence.")] = _DEFAULT.context,
    quota: Annotated[int, typer.Option(help="Microbatches per step.")] = _DEFAULT.quota,
    microbatch: Annotated[
        int, typer.Option(help="Sequences per microbatch.")
    ] = _DEFAULT.microbatch,
    learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate of AdamW.")
    ] = _DEFAULT.learning_rate,
    wire_dtype: Annotated[
        str, typer.Option(help="How activations cross: float32 or bfloat16.")
    ] = _DEFAULT.wire_dtype,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = _DEFAULT.seed,
    chaos: Annotated[
        float,
        typer.Option(
            help="In this share of the steps kill a holder, sometimes both of a stage; 5 stages.",
            min=0.0,
            max=1.0,
        ),
    ] = 0.0,
    data: DataOption = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Where logs and weights go; by default a new temporary directory.", file_okay=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small model on real text with a swarm of real nodes on this computer."""
    recipe = Recipe(
        name="demo",
        layers=layers,
        width=width,
        context=context,
        stages=stages,
        holders=holders,
        data_nodes=data_nodes,
        steps=steps,
        quota=quota,
        microbatch=microbatch,
        learning_rate=learning_rate,
        wire_dtype=wire_dtype,
        seed=seed,
    )
    if chaos:
        recipe = _for_chaos(recipe, context_)
    with Interrupts() as interrupts:
        try:
            _run(recipe, data or [], keep, interrupts, chaos, as_json=as_json)
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None


def _for_chaos(recipe: Recipe, given: typer.Context) -> Recipe:
    """Rebuild lost stages; five stages of one layer, unless the person says otherwise."""

    def is_default(name: str) -> bool:
        source = given.get_parameter_source(name)
        return source is None or source.name == "DEFAULT"

    num_stages = CHAOS_STAGES if is_default("stages") else recipe.stages
    num_layers = num_stages if is_default("layers") else recipe.layers
    method = "checkfree" if num_stages >= LEAST_FOR_REBUILDING else "none"
    return replace(recipe, stages=num_stages, layers=num_layers, recovery=method)


def _run(
    recipe: Recipe,
    data: Sequence[Path],
    keep: Path | None,
    interrupts: Interrupts,
    chaos: float,
    *,
    as_json: bool,
) -> None:
    from cli.summary import summarise
    from node.local_swarm import LocalSwarm

    root = keep or Path(tempfile.mkdtemp(prefix="shoal-demo-"))
    swarm = LocalSwarm(
        root, recipe.manifest, holders=recipe.holders, data_nodes=recipe.data_nodes, data=data
    )
    interrupts.hurry = swarm.hurry
    watch = Watch(swarm, Chaos(swarm, chaos, recipe.seed))
    sample = ""
    try:
        sample = _train(swarm, watch, to_stderr=as_json)
    except KeyboardInterrupt:
        say("\nstopping; press Ctrl-C again to kill at once")
        raise
    finally:
        swarm.stop(_PATIENCE_S)
        num_leftover = len(swarm.leftovers())
        if not watch.is_complete:
            _tell_saved(swarm, watch)
    summarise(swarm, watch, sample, num_leftover, as_json=as_json)


def _train(swarm: LocalSwarm, watch: Watch, *, to_stderr: bool) -> str:
    """Start the swarm, follow it to the last step, and return a text that it wrote."""
    from cli.live import Progress
    from node.local_swarm import DaemonDiedError

    with Progress(to_stderr=to_stderr) as progress:
        try:
            progress.tell(f"{swarm.num_nodes} nodes; logs and weights go to {swarm.root}")
            swarm.start(progress.tell)
            while not watch.is_complete:
                progress.show(watch.look())
                threading.Event().wait(_POLL_S)
            progress.show(watch.look())
            return _finish(swarm, progress)
        except DaemonDiedError as death:
            lines = death.daemon.last_lines()
            _raise_owners_mistake(death.daemon.name, lines)
            for line in lines:
                progress.tell(f"{death.daemon.name}: {line}")
            raise


def _raise_owners_mistake(name: str, lines: Sequence[str]) -> None:
    """Raise the ConfigError with which a node ended: what a person gave is what is wrong."""
    from protocol.errors import ConfigError

    told = re.search(r"^error\[config\]: (.*)\nremedy: (.*)", "\n".join(lines), re.MULTILINE)
    if told:
        raise ConfigError(f"{name}: {told[1]}", told[2])


def _finish(swarm: LocalSwarm, progress: Progress) -> str:
    """Wait until the weights are written; let the swarm write a little text."""
    from protocol.errors import ShoalError

    progress.tell("training is done; the swarm writes its weights and a sample")
    swarm.wait_until(lambda: _has_saved(swarm), "the weights to be written")
    try:
        told = swarm.organiser.client.generate("def ", 200, temperature=_TEMPERATURE)
        return "".join(event.text for event in told)
    except ShoalError as error:
        progress.tell(f"no sample: {error.cause}")
        return ""


def _has_saved(swarm: LocalSwarm) -> bool:
    expected = {daemon.state_dir for daemon in swarm.daemons if daemon.is_wanted}
    return {path.parent.parent for path in swarm.saved()} >= expected


def _tell_saved(swarm: LocalSwarm, watch: Watch) -> None:
    """Say what an interrupted run leaves behind."""
    say(f"{len(watch.steps)} of {swarm.manifest.training.steps} steps were done")
    saved = swarm.saved()
    say(f"weights: {len(saved)} files" if saved else "weights: none were written yet")
    say(f"logs and keys: {swarm.root}")
