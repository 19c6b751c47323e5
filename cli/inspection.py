"""Looking at a node: `status`, `peers`, `identity show`, `config show`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from cli.options import JsonOption, StateOption
from cli.output import duration, emit, emit_json, facts, size, table
from node.client import ControlClient
from node.config import load_config
from node.identity import load_key
from node.paths import StatePaths, state_paths
from node.status import FlowStatus, NodeStatus, PeerStatus, Setting
from protocol.errors import Unreachable

identity_app = typer.Typer(help="Who this node is.", no_args_is_help=True)
config_app = typer.Typer(help="How this node is set up.", no_args_is_help=True)


def status(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Who am I, in which swarm, at which stage and step, what counted, what went wrong."""
    with ControlClient(state_paths(state).root) as client:
        answer = client.status()
    if as_json:
        emit_json(answer.model_dump(mode="json"))
    else:
        emit(facts(_status_facts(answer)))


def _status_facts(answer: NodeStatus) -> dict[str, object]:
    known: dict[str, object] = {
        "node": answer.peer_id,
        "swarm": f"{answer.name} ({answer.swarm})",
        "role": answer.role,
        "state": answer.state,
        "stage": _stage(answer),
        "state from": answer.state_origin or "not there yet",
        "step": answer.step,
        "loss": _loss(answer.loss, answer.loss_step),
        "validation loss": _loss(answer.validation_loss, answer.validation_step),
        "committed, last hour": f"{answer.committed_last_hour} microbatches",
        "committed, in total": f"{answer.committed_total} microbatches",
        "speed": f"{answer.tokens_per_s:.0f} tokens/s",
        "flows": f"{answer.flows.num_in} in, {answer.flows.num_out} out",
        "cost to data node": _cost(answer.flows),
        "last re-routing": _rerouting(answer.flows),
        "received": size(answer.bytes_in),
        "sent": size(answer.bytes_out),
        "peers": answer.peers,
        "found by others": "yes" if answer.registered else "not yet",
        "running for": duration(answer.uptime_s),
        "last problem": _problem(answer),
    }
    if answer.last_problem and answer.last_problem.hint:
        known["remedy"] = answer.last_problem.hint
    # Only a data node sees losses and whole steps.
    hidden = {"loss", "validation loss", "speed"} if answer.role == "volunteer" else set()
    return {name: value for name, value in known.items() if name not in hidden}


def _loss(value: float | None, step: int | None) -> str:
    if value is None or step is None:
        return "not known yet"
    return f"{value:.4f} nats per token (step {step + 1})"


def _stage(answer: NodeStatus) -> str:
    if answer.stage is None:
        return "none yet"
    return f"{answer.stage} ({answer.stage_reason})" if answer.stage_reason else str(answer.stage)


def _cost(flows: FlowStatus) -> str:
    return "no flows yet" if flows.cost_s is None else f"{flows.cost_s * 1000:.0f} ms"


def _rerouting(flows: FlowStatus) -> str:
    if flows.rerouted_age_s is None:
        return "none"
    return f"{duration(flows.rerouted_age_s)} ago: {flows.rerouted_why}"


def _problem(answer: NodeStatus) -> str:
    problem = answer.last_problem
    if problem is None:
        return "none"
    at = datetime.fromtimestamp(problem.at).astimezone().isoformat(" ", "seconds")
    return f"[{problem.code}] {problem.text} ({at})"


def peers(state: StateOption = None, as_json: JsonOption = False) -> None:
    """The nodes that this one knows."""
    with ControlClient(state_paths(state).root) as client:
        answer = client.peers()
    if as_json:
        emit_json([peer.model_dump(mode="json") for peer in answer])
    else:
        heads = ("peer", "stage", "step", "up", "round trip", "received", "sent", "address")
        emit(table(heads, map(_peer_row, answer)))


def _peer_row(peer: PeerStatus) -> tuple[object, ...]:
    return (
        peer.peer_id,
        "-" if peer.stage is None else peer.stage,
        "-" if peer.step is None else peer.step,
        "yes" if peer.is_up else "no",
        "-" if peer.rtt_ms is None else f"{peer.rtt_ms:.1f} ms",
        size(peer.bytes_in),
        size(peer.bytes_out),
        (peer.address or "-").removesuffix(f"/p2p/{peer.peer_id}"),
    )


@identity_app.command("show")
def identity_show(state: StateOption = None, as_json: JsonOption = False) -> None:
    """The node's PeerID and where its key lies."""
    paths = state_paths(state)
    known = {"peer_id": load_key(paths.key).peer_id, "key": str(paths.key)}
    if as_json:
        emit_json(known)
    else:
        emit(facts(known))


@config_app.command("show")
def config_show(
    origin: Annotated[
        bool, typer.Option("--origin", help="Tell where each setting came from.")
    ] = False,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """The settings in force: of the running node, else those it would start with."""
    rows = _settings(state_paths(state))
    if as_json:
        hidden = set() if origin else {"origin"}
        emit_json([row.model_dump(mode="json", exclude=hidden) for row in rows])
        return
    shown = [(row.name, _text(row.value), f"({row.origin})" if origin else "") for row in rows]
    emit(table(("setting", "value", "from" if origin else ""), shown))


def _settings(paths: StatePaths) -> list[Setting]:
    try:
        with ControlClient(paths.root) as client:
            return client.config()
    except Unreachable:
        rows = load_config(paths.config).rows()
        return [Setting(name=name, value=value, origin=origin) for name, value, origin in rows]


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)
