"""The model of a running swarm: `shoal export` and `shoal generate`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.interrupts import Interrupts
from cli.options import JsonOption, StateOption
from cli.output import emit_json, facts, printable, say, size
from node.client import ControlClient
from node.paths import state_paths
from node.status import MAX_GENERATED_TOKENS

_INTERRUPTED = 130
_BAR_CHARS = 30


class ExportFormat(StrEnum):
    """How the model is written."""

    HF = "hf"


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Made by this command; must not exist yet.")
    ],
    format_: Annotated[
        ExportFormat, typer.Option("--format", help="hf: as `transformers` loads it.")
    ] = ExportFormat.HF,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the whole model at one step, for whom the manifest's `export` allows it."""
    from node.export_folder import export_model

    del format_  # there is one so far
    with Interrupts(), ControlClient(state_paths(state).root) as client:
        try:
            done = export_model(client, folder, _Bar().show)
        except KeyboardInterrupt:
            say("\ninterrupted; nothing was written")
            raise typer.Exit(_INTERRUPTED) from None
    known: dict[str, object] = {
        "folder": str(done.folder),
        "step": done.step,
        "stages": done.num_stages,
        "parameters": done.num_parameters,
    }
    if as_json:
        emit_json(known)
    else:
        typer.echo(facts(known))


class _Bar:
    """One line on a terminal, a line for each stage elsewhere."""

    def __init__(self) -> None:
        self._stage = -1

    def show(self, stage: int, num_bytes: int, weight_bytes: int) -> None:
        """Tell how far the weights of a stage are; the rest of its state is only checked."""
        if sys.stderr.isatty():
            share = min(1.0, num_bytes / weight_bytes)
            done = "#" * round(share * _BAR_CHARS)
            sys.stderr.write(f"\r\x1b[Kstage {stage} [{done:<{_BAR_CHARS}}] {size(num_bytes)}")
            sys.stderr.flush()
        elif stage != self._stage:
            say(f"stage {stage}: {size(weight_bytes)} of weights")
        self._stage = stage


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; may be empty.")],
    max_tokens: Annotated[
        int,
        typer.Option(help="Tokens to write at most.", min=1, max=MAX_GENERATED_TOKENS),
    ] = 100,
    temperature: Annotated[
        float,
        typer.Option(help="0 takes the likeliest token; 1 draws as the model says.", min=0),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a text with the model as it is now; the node must be a data node."""
    step, end, text = None, None, ""
    num_tokens = 0
    with Interrupts(), ControlClient(state_paths(state).root) as client:
        try:
            for event in client.generate(prompt, max_tokens, temperature=temperature, seed=seed):
                if event.step is not None:
                    step = event.step
                    say(f"with the weights of step {step}")
                    continue
                num_tokens, end, text = event.num_tokens, event.end, text + event.text
                if not as_json:
                    typer.echo(printable(event.text), nl=False)
        except KeyboardInterrupt:
            say("\ninterrupted")
            raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        emit_json({"text": text, "step": step, "num_tokens": num_tokens, "end": end})
    else:
        typer.echo()
