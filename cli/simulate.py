"""Trying things out on a simulated swarm: `shoal simulate`."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.options import JsonOption
from cli.output import emit, emit_json, facts, say, table
from cli.simulate_training import training
from cli.simulated_network import simulated_network
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from protocol.simulation.routing.network import RoutingNetwork
    from protocol.simulation.routing.trial import Change, Script, Trial

app = typer.Typer(help="Try routing and training on a simulated swarm.", no_args_is_help=True)
app.command("training")(training)


class Policy(StrEnum):
    """The routers to choose from."""

    GWTF = "gwtf"
    SWARM = "swarm"
    SWARM_RECOMPUTE = "swarm-recompute"
    GREEDY = "greedy"
    DT_FM = "dt-fm"
    PETALS = "petals"
    RANDOM = "random"


@app.command("routing")
def routing(
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, data nodes included (33).", min=2, max=5000)
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages (8).", min=1, max=1000)] = None,
    data_nodes: Annotated[int | None, typer.Option(help="Data nodes (1).", min=1, max=1000)] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal runs.", min=0)] = 0,
    network: Annotated[
        str,
        typer.Option(help="`random`, `regions` (ten, measured), or a file: docs/network-file.md."),
    ] = "random",
    churn: Annotated[
        float, typer.Option(help="Part of the holders that changes every 30 ticks.", min=0, max=0.9)
    ] = 0.0,
    burst: Annotated[
        float, typer.Option(help="Part of the holders that dies half-way.", min=0, max=0.9)
    ] = 0.0,
    loss: Annotated[
        float, typer.Option(help="Part of the messages that never arrives.", min=0, max=0.9)
    ] = 0.01,
    policy: Annotated[Policy, typer.Option(help="Who chooses the routes.")] = Policy.GWTF,
    ticks: Annotated[int, typer.Option(help="Rounds of 2 s to run.", min=1, max=100_000)] = 200,
    paper_form: Annotated[
        bool, typer.Option("--paper-form", help="Average a link's two bandwidths arithmetically.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Folder for network.png and convergence.png.", file_okay=False),
    ] = None,
    save_network: Annotated[
        Path | None,
        typer.Option(help="Write the network to this file, to edit it.", dir_okay=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let routes grow on a simulated network with real messages, delay and loss; judge them."""
    from protocol.simulation.routing.report import summary
    from protocol.simulation.routing.trial import Script

    began_s = time.monotonic()
    shape = (nodes, stages, data_nodes)
    chosen = simulated_network(network, shape, seed, is_arithmetic=paper_form)
    if picture is not None:
        _make(picture)
    if save_network is not None:
        _save(save_network, chosen)
    script = Script(ticks=ticks, churn=churn, burst=burst)
    trial = _run(chosen, policy.value, script, seed, loss)
    if picture is not None:
        _draw(picture, trial)
    told = summary(trial, time.monotonic() - began_s)
    if as_json:
        emit_json(told)
    else:
        _tell(trial)


def _save(path: Path, network: RoutingNetwork) -> None:
    from protocol.simulation.routing.network_file import to_file

    _make(path.parent)
    try:
        path.write_text(to_file(network))
    except OSError as error:
        raise _not_written(path, error) from error
    say(f"the network is in {path}")


def _make(folder: Path) -> None:
    """Before the run, which may take long, and not after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from error


def _not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write to {path}: {error.strerror}", "Name another place.")


def _run(network: RoutingNetwork, policy: str, script: Script, seed: int, loss: float) -> Trial:
    from rich.console import Console
    from rich.progress import Progress

    from protocol.simulation.routing.trial import run_trial
    from protocol.simulation.routing.world import WorldOptions

    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("routing", total=script.ticks)
        return run_trial(
            network,
            policy,
            script,
            seed,
            options=WorldOptions(loss=loss),
            clock=time.process_time,
            on_tick=lambda tick: progress.update(bar, completed=tick),
        )


def _draw(folder: Path, trial: Trial) -> None:
    from cli.routing_picture import draw_convergence, draw_network

    draw_network(folder / "network.png", trial)
    draw_convergence(folder / "convergence.png", trial)
    say(f"pictures: {folder / 'network.png'}, {folder / 'convergence.png'}")


def _tell(trial: Trial) -> None:
    last, best, greedy = trial.last.worth, trial.last.best, trial.greedy
    rows = [
        (
            trial.policy,
            last.flow,
            _seconds(last.mean_s),
            _seconds(last.max_s),
            _over(trial.last.ratio),
        ),
        (
            "greedy, knowing all",
            greedy.flow,
            _seconds(greedy.mean_s),
            _seconds(greedy.max_s),
            _over(greedy.mean_s / best.mean_s),
        ),
        ("optimum (linear program)", best.flow, _seconds(best.mean_s), "", ""),
    ]
    emit(table(("routes by", "flows", "mean cost", "largest cost", "over optimum"), rows))
    emit("")
    emit(facts(_facts(trial)))
    if trial.changes:
        emit("")
        heads = ("tick", "what", "died", "came", "maximum flow", "whole again after")
        emit(table(heads, map(_change_row, trial.changes)))


def _facts(trial: Trial) -> dict[str, object]:
    network = trial.network
    known: dict[str, object] = {
        "network": f"{network.num_nodes} nodes, {network.num_stages} stages, "
        f"{_counted(len(network.data_nodes), 'data node')}",
        "maximum flow after": _rounds(trial.rounds_to_max_flow),
        "settled after": _rounds(trial.rounds_to_converge),
    }
    if trial.policy == Policy.GWTF.value:
        known["messages"] = f"{trial.messages_per_node_tick:.1f} per node and tick"
        known["processor"] = f"{trial.cpu_s:.1f} s for all nodes together"
    return known


def _change_row(change: Change) -> tuple[object, ...]:
    again = "not in time" if change.recovered is None else _counted(change.recovered, "tick")
    return change.tick, change.kind, change.num_gone, change.num_come, change.best.flow, again


def _seconds(value: float) -> str:
    return f"{value:.3f} s"


def _over(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def _rounds(value: int | None) -> str:
    return "never" if value is None else _counted(value, "tick")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
