"""What a trial is summed up in: the numbers that a person, a script and a table want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from protocol.simulation.routing.trial import Change, Trial

Number = float | int | str | None
Summary = dict[str, Number | list[dict[str, Number]]]


def summary(trial: Trial, seconds: float) -> Summary:
    """Return a trial as JSON-able values; costs are means per path, in s."""
    last = trial.last
    return {
        "policy": trial.policy,
        "nodes": trial.network.num_nodes,
        "stages": trial.network.num_stages,
        "data_nodes": len(trial.network.data_nodes),
        "ticks": last.tick,
        "flow": last.worth.flow,
        "optimal_flow": last.best.flow,
        "cost": round(last.worth.mean_s, 6),
        "optimal_cost": round(last.best.mean_s, 6),
        "ratio": round(last.ratio, 6),
        "greedy_cost": round(trial.greedy.mean_s, 6),
        "max_cost": round(last.worth.max_s, 6),
        "rounds_to_max_flow": trial.rounds_to_max_flow,
        "rounds_to_converge": trial.rounds_to_converge,
        "messages_per_node_tick": round(trial.messages_per_node_tick, 3),
        "router_cpu_s": round(trial.cpu_s, 3),
        "seconds": round(seconds, 3),
        "trace": trial.digest,
        "changes": [_change(change) for change in trial.changes],
    }


def _change(change: Change) -> dict[str, Number]:
    found: Mapping[str, Number] = asdict(change) | {
        "best": None,
        "optimal_flow": change.best.flow,
        "optimal_cost": round(change.best.mean_s, 6),
    }
    return {name: value for name, value in found.items() if name != "best"}
