"""The numbers of the flow router, most of them from the GWTF prototype (spec 1.3)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt


class RoutingSettings(BaseModel):
    """Times are ticks unless they end in ``_s``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tick_s: PositiveFloat = 2.0
    # view: peers of a neighbouring stage (20 nearest + 10 random), and of the own one
    num_nearest: PositiveInt = 20
    num_random: PositiveInt = 10
    num_same: PositiveInt = 8
    redraw_ticks: PositiveInt = 40
    search_ticks: PositiveInt = 4  # the same while a flow finds no way on
    audience: PositiveInt = 12  # peers that are told news at once
    # growth
    sink_surplus: PositiveFloat = 2.0
    request_ticks: PositiveInt = 3
    orphan_ticks: PositiveInt = 12
    idle_ticks: PositiveInt = 10
    max_backoff_ticks: PositiveInt = 64
    stub_ticks: PositiveInt = 2
    # healing
    check_ticks: PositiveInt = 5
    grace_ticks: PositiveInt = 2
    refresh_ticks: PositiveInt = 12
    forget_ticks: PositiveInt = 60
    handover_ticks: PositiveInt = 5
    # exchange and annealing: T0 is ``heat`` times the mean link cost
    exchange_chance: NonNegativeFloat = 0.2
    heat: NonNegativeFloat = 0.1
    cooling: PositiveFloat = 0.95
    cooling_per_tick: PositiveFloat = 0.93
    bar_ticks: PositiveInt = 5
    # crossings: how often, per tick, a data node looks for some of a flow; T0 as above
    crossing_chance: NonNegativeFloat = 0.25
    crossing_heat: NonNegativeFloat = 0.3
    crossing_cooling_per_tick: PositiveFloat = 0.98
    # labels and tokens
    min_hops: PositiveInt = 24
    label_gap: PositiveFloat = 0.15
    label_refresh_ticks: PositiveInt = 20
    vote_ticks: PositiveInt = 2
    ask_ticks: PositiveInt = 1
    verdict_ticks: PositiveInt = 6
    epsilon: NonNegativeFloat = 1e-9
