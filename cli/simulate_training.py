"""`shoal simulate training`: whole steps of a simulated swarm under several routers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.options import JsonOption
from cli.output import emit, emit_json, facts, say, table
from cli.simulated_network import simulated_network

if TYPE_CHECKING:
    from protocol.simulation.routing.network import RoutingNetwork
    from protocol.simulation.training import Outcome, Workload


class TrainingPolicy(StrEnum):
    """The routers to compare, or all of them."""

    ALL = "all"
    GWTF = "gwtf"
    SWARM = "swarm"
    SWARM_RECOMPUTE = "swarm-recompute"
    GREEDY = "greedy"
    DT_FM = "dt-fm"
    PETALS = "petals"
    RANDOM = "random"


def training(
    nodes: Annotated[
        int | None, typer.Option(help="Nodes, data nodes included (33).", min=2, max=1000)
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages (8).", min=1, max=100)] = None,
    data_nodes: Annotated[int | None, typer.Option(help="Data nodes (1).", min=1, max=100)] = None,
    steps: Annotated[int, typer.Option(help="Optimiser steps.", min=1, max=10_000)] = 5,
    microbatches: Annotated[int, typer.Option(help="Of each step.", min=1, max=100_000)] = 64,
    churn: Annotated[
        float, typer.Option(help="Part of the holders that dies in each step.", min=0, max=0.9)
    ] = 0.0,
    policy: Annotated[
        list[TrainingPolicy] | None, typer.Option(help="Who chooses the routes; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal runs.", min=0)] = 0,
    network: Annotated[
        str,
        typer.Option(help="`random`, `regions` (ten, measured), or a file: docs/network-file.md."),
    ] = "regions",
    picture: Annotated[
        Path | None, typer.Option(help="Folder for a picture of each router.", file_okay=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Let a simulated swarm train, with the same crashes for each router, and count seconds."""
    from protocol.simulation.training import Workload, with_compute

    chosen = simulated_network(network, (nodes, stages, data_nodes), seed, is_arithmetic=False)
    if network == "random":
        chosen = with_compute(chosen, seed)
    workload = Workload(steps=steps, microbatches=microbatches)
    outcomes = _run(chosen, workload, _names(policy or [TrainingPolicy.ALL]), churn, seed)
    if picture is not None:
        _draw(picture, outcomes)
    if as_json:
        emit_json([outcome.summary() for outcome in outcomes])
    else:
        _tell(chosen, workload, churn, outcomes)


def _names(policies: Sequence[TrainingPolicy]) -> list[str]:
    if TrainingPolicy.ALL in policies:
        return [p.value for p in TrainingPolicy if p is not TrainingPolicy.ALL]
    return list(dict.fromkeys(p.value for p in policies))


def _run(
    network: RoutingNetwork, workload: Workload, names: Sequence[str], churn: float, seed: int
) -> list[Outcome]:
    from rich.console import Console
    from rich.progress import track

    from protocol.simulation.training import POLICIES, FaultScript, Fleet, simulate

    fleet = Fleet(network, workload)
    holders = [n for n in range(network.num_nodes) if n not in network.data_nodes]
    script = FaultScript.draw(holders, workload.steps, churn, seed)
    console = Console(stderr=True)
    return [
        simulate(fleet, POLICIES[name](), script, seed)
        for name in track(names, "training", console=console, transient=True)
    ]


def _draw(folder: Path, outcomes: Sequence[Outcome]) -> None:
    from cli.training_picture import draw_gantt

    folder.mkdir(parents=True, exist_ok=True)
    for outcome in outcomes:
        path = folder / f"training-{outcome.policy}.png"
        draw_gantt(path, outcome)
        say(f"picture: {path}")


def _tell(
    network: RoutingNetwork, workload: Workload, churn: float, outcomes: Sequence[Outcome]
) -> None:
    told = {
        "network": f"{network.num_nodes} nodes, {network.num_stages} stages",
        "work": f"{workload.steps} steps of {workload.microbatches} microbatches",
        "churn": f"{100 * churn:g} % of the holders die in each step, as many come",
    }
    emit(facts(told))
    emit("")
    heads = ("router", "s/step", "median", "95 %", "done", "in vain", "messages")
    emit(table((*heads, "resent", "repaired", "resummed", "anew"), map(_row, outcomes)))


def _row(outcome: Outcome) -> tuple[object, ...]:
    known: dict[str, Any] = outcome.summary()
    step_s, recoveries = known["step_s"], known["recoveries"]
    return (
        outcome.policy if outcome.is_complete else f"{outcome.policy} (hangs)",
        *(_seconds(step_s[name]) for name in ("mean", "median", "p95")),
        outcome.microbatches,
        f"{100 * known['wasted_share']:.1f} %",
        known["messages"],
        *(recoveries[name] for name in ("resends", "repairs", "lost_sums", "restarts")),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
