"""What the routing benchmark runs: one network, one seed, one script per job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from protocol.simulation.routing.families import (
    N33,
    N97,
    N97_WIDE,
    N1001,
    Family,
    at_home,
    in_regions,
)
from protocol.simulation.routing.network import RoutingNetwork
from protocol.simulation.routing.policies import POLICIES
from protocol.simulation.routing.regions import SKIPPIPE
from protocol.simulation.routing.routes import worth
from protocol.simulation.routing.trial import Script, Trial, run_trial
from protocol.simulation.routing.world import WorldOptions

LOSS = 0.01
GROWING_TICKS = 5
AFTER_BURST_TICKS = 20  # a run goes on that long once the flow is whole again
CURVE_TICKS = (10, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400)

FAMILIES: dict[str, Callable[[int], RoutingNetwork]] = {
    "N=33, cap 2-5, d 1-10": N33.network,
    "N=97, cap 1-5, d 20-100": N97.network,
    "N=97, cap 1-20, d 1-100": N97_WIDE.network,
    "N=97, ten regions": lambda seed: in_regions(97, 8, seed),
    "N=97, twelve locations": lambda seed: in_regions(97, 8, seed, regions=SKIPPIPE),
    "N=97, ten regions, home links": lambda seed: at_home(in_regions(97, 8, seed), seed),
    "N=100, 4 data nodes": Family(100, num_data_nodes=4).network,
    "N=100, 4 data nodes, ten regions": lambda seed: in_regions(100, 8, seed, num_data_nodes=4),
    "N=1001, cap 1-5, d 20-100": N1001.network,
    "N=100": Family(100, num_stages=10).network,
    "N=1000": Family(1000, num_stages=10).network,
    "N=5000": Family(5000, num_stages=10).network,
}


@dataclass(frozen=True)
class Job:
    """One run."""

    table: str
    family: str
    seed: int
    ticks: int
    burst: float = 0.0
    burst_tick: int | None = None
    is_arithmetic: bool = False

    @property
    def key(self) -> str:
        """What tells it from the others."""
        return " ".join(map(str, asdict(self).values()))


def run_job(job: Job) -> dict[str, Any]:
    """Run it; costs are judged in the harmonic form, whatever the router was told."""
    network = FAMILIES[job.family](job.seed)
    told = replace(network, is_arithmetic=job.is_arithmetic)
    script = Script(
        ticks=job.ticks,
        burst=job.burst,
        burst_tick=job.burst_tick,
        after_ticks=AFTER_BURST_TICKS,
    )
    # reading the processor's clock for each message takes as long as the router does
    clock = time.process_time if job.table == "messages" else None
    began = time.monotonic()
    trial = run_trial(told, "gwtf", script, job.seed, options=WorldOptions(loss=LOSS), clock=clock)
    others = _others(trial) if job.table == "cost" else {}
    seconds = time.monotonic() - began
    return asdict(job) | _numbers(network, trial) | {"others": others, "seconds": seconds}


def _numbers(network: RoutingNetwork, trial: Trial) -> dict[str, Any]:
    last, points = trial.last, trial.points
    change = trial.changes[0] if trial.changes else None
    fair = worth(network, trial.routes)
    quarter = max(1, len(points) // 4)
    node_ticks = network.num_nodes * len(points)
    return {
        "flow": last.worth.flow,
        "optimal_flow": last.best.flow,
        "ratio": last.ratio,
        "fair_mean_s": fair.mean_s,
        "curve": {p.tick: p.ratio if p.is_full else None for p in points if p.tick in CURVE_TICKS},
        "held": sum(p.is_full for p in points[-quarter:]) / quarter,
        "to_max_flow": trial.rounds_to_max_flow,
        "to_converge": trial.rounds_to_converge,
        "recovered": change.recovered if change else None,
        "messages_first": sum(p.messages_per_node for p in points[:quarter]) / quarter,
        "messages_last": sum(p.messages_per_node for p in points[-quarter:]) / quarter,
        "messages": [round(p.messages_per_node, 1) for p in points[:GROWING_TICKS]],
        "most_messages": [p.most_messages for p in points[:GROWING_TICKS]],
        "cpu_us": 1e6 * trial.cpu_s / node_ticks,
    }


def _others(trial: Trial) -> dict[str, tuple[int, float]]:
    """What other policies reach on the same network: flows, and mean cost over the optimum."""
    found = {}
    for name, policy in POLICIES.items():
        routes = policy(trial.network, range(trial.network.num_nodes), Random(0))
        value = worth(trial.network, routes)
        found[name] = (value.flow, value.mean_s / trial.last.best.mean_s)
    return found
