"""The one table of time limits. Every await on another party takes its limit from here.

Times are monotonic seconds. ``NESTED`` lists which limit must exceed which: an outer limit that
fires before an inner one hides the real cause. A test holds both, and docs/ prints the table.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, PositiveFloat, model_validator

NESTED: tuple[tuple[str, str], ...] = (
    ("dial_s", "negotiate_s"),
    ("session_silence_s", "heartbeat_s"),
    ("delivery_s", "dial_s"),
    ("delivery_s", "write_stall_s"),
    ("request_s", "delivery_s"),
    ("averaging_s", "request_s"),
    ("request_s", "allreduce_s"),
    ("allreduce_s", "session_silence_s"),
    ("matchmaking_s", "write_stall_s"),
    ("flow_s", "delivery_s"),
    ("flow_s", "hop_s"),
    ("flow_s", "flow_floor_s"),
    ("flow_floor_s", "session_silence_s"),
    ("hop_s", "hop_floor_s"),
    ("step_stall_s", "averaging_s"),
    ("state_wait_s", "step_stall_s"),
    ("sidecar_start_s", "sidecar_call_s"),
    ("record_lifetime_s", "record_refresh_s"),
    ("record_lifetime_s", "discovery_rest_s"),
    ("discovery_rest_s", "discovery_s"),
    ("drain_s", "delivery_s"),
    ("pin_silence_s", "delivery_s"),
    ("pin_age_s", "pin_silence_s"),
)


class Deadlines(BaseModel):
    """Time limits in seconds; ``scaled`` gives a table for tests or slow links."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # transport
    negotiate_s: PositiveFloat = 5.0
    dial_s: PositiveFloat = 8.0
    heartbeat_s: PositiveFloat = 1.0
    session_silence_s: PositiveFloat = 6.0
    write_stall_s: PositiveFloat = 5.0
    delivery_s: PositiveFloat = 20.0
    reconnect_grace_s: PositiveFloat = 0.5
    redial_backoff_s: PositiveFloat = 0.5
    # core
    request_s: PositiveFloat = 30.0
    presence_s: PositiveFloat = 1.0
    discovery_s: PositiveFloat = 1.0
    discovery_rest_s: PositiveFloat = 8.0
    hop_floor_s: PositiveFloat = 2.0
    hop_s: PositiveFloat = 20.0
    flow_floor_s: PositiveFloat = 15.0
    flow_s: PositiveFloat = 60.0
    averaging_s: PositiveFloat = 40.0
    matchmaking_s: PositiveFloat = 8.0
    allreduce_s: PositiveFloat = 20.0
    step_stall_s: PositiveFloat = 120.0
    state_wait_s: PositiveFloat = 600.0
    admission_hold_s: PositiveFloat = 60.0
    rebuild_wait_s: PositiveFloat = 5.0
    leadership_s: PositiveFloat = 10.0
    drain_s: PositiveFloat = 25.0
    pin_silence_s: PositiveFloat = 30.0
    pin_age_s: PositiveFloat = 3600.0
    # side-car and registry
    sidecar_start_s: PositiveFloat = 60.0
    sidecar_call_s: PositiveFloat = 10.0
    sidecar_probe_s: PositiveFloat = 3.0
    record_refresh_s: PositiveFloat = 5.0
    record_lifetime_s: PositiveFloat = 30.0
    # local control
    control_s: PositiveFloat = 10.0

    @model_validator(mode="after")
    def _outer_exceeds_inner(self) -> Deadlines:
        for outer, inner in NESTED:
            if getattr(self, outer) <= getattr(self, inner):
                raise ValueError(f"{outer} must exceed {inner}")
        return self

    def scaled(self, factor: float) -> Deadlines:
        """Return the same table with every limit multiplied by ``factor``."""
        return Deadlines(**{name: value * factor for name, value in self})
