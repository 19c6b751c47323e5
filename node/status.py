"""What the control API answers: the daemon fills these in, the CLI prints them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_GENERATED_TOKENS = 4096

NodeState = Literal[
    "starting", "syncing", "waiting", "training", "paused", "alone", "draining", "degraded", "done"
]


class Answer(BaseModel):
    """What all answers share. NaN crosses as a string, because JSON has none."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Problem(Answer):
    """The last thing that went wrong. ``at`` is wall time in seconds since the epoch."""

    code: str
    text: str
    at: float
    hint: str | None = None  # what the owner can do


class FlowLink(Answer):
    """The units of flow between this node and a neighbour, for one data node.

    A unit is room for one microbatch. ``link_s`` is the cost of that link, ``to_data_node_s`` the
    mean cost of what follows it.
    """

    peer: str
    data_node: str
    units: int
    link_s: float
    to_data_node_s: float


class FlowStatus(Answer):
    """The flows through this node; ``cost_s`` is their mean cost from here to the data node."""

    incoming: tuple[FlowLink, ...] = ()
    outgoing: tuple[FlowLink, ...] = ()
    cost_s: float | None = None
    rerouted_age_s: float | None = None
    rerouted_why: str | None = None

    @property
    def num_in(self) -> int:
        """Units that arrive here."""
        return sum(link.units for link in self.incoming)

    @property
    def num_out(self) -> int:
        """Units that leave here."""
        return sum(link.units for link in self.outgoing)


class NodeStatus(Answer):
    """Who this node is, what it serves and how it fares.

    ``swarm`` is the swarm's id and ``name`` its name; ``stage`` is None until one is assigned,
    0 on a data node. Times are seconds, losses nats per token, each with the step that it is of.
    """

    peer_id: str
    swarm: str
    name: str
    role: str
    stage: int | None = None
    stage_reason: str = ""  # why it serves that one
    state_origin: str = ""  # where the stage's state came from
    step: int = 0
    term: int = 0
    state: NodeState = "starting"
    committed_last_hour: int = 0
    committed_total: int = 0  # in all its runs
    last_problem: Problem | None = None
    loss: float | None = None
    loss_step: int | None = None
    validation_loss: float | None = None
    validation_step: int | None = None
    tokens_per_s: float = 0.0
    uptime_s: float = 0.0
    registered: bool = False
    sidecar_up: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    peers: int = 0
    state_digest: str | None = None
    state_bytes: int = 0
    seconds_to_first_commit: float | None = None
    progress_age_s: float | None = None
    flows: FlowStatus = FlowStatus()


class PeerStatus(Answer):
    """Another node as this one sees it; ``stage`` is None if it serves none."""

    peer_id: str
    stage: int | None = None
    address: str | None = None
    rtt_ms: float | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    is_up: bool = False
    step: int | None = None


class StepStatus(Answer):
    """One finished step. ``committed`` and ``reissued`` count microbatches."""

    step: int
    loss: float | None = None
    validation_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    committed: int = 0
    reissued: int = 0


class Setting(Answer):
    """One setting in force and where it came from."""

    name: str
    value: object = None
    origin: str


class IdentityStatus(Answer):
    """Who this node is, for the list of an organiser."""

    peer_id: str
    swarm: str
    name: str
    role: str


class ErrorAnswer(Answer):
    """An error on its way to the person who caused it."""

    code: str
    cause: str
    hint: str


class GenerateRequest(Answer):
    """What POST /generate takes; temperature 0 always takes the likeliest token."""

    prompt: str
    num_tokens: Annotated[int, Field(ge=1, le=MAX_GENERATED_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=1000)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0


class GenerateEvent(Answer):
    """A line of what POST /generate answers.

    The first one has ``step``, whose weights are used, and the length of the prompt; the following
    ones bring text and count tokens; the last one says why it ends.
    """

    step: int | None = None
    text: str = ""
    num_tokens: int = 0
    end: Literal["length", "separator"] | None = None
    error: ErrorAnswer | None = None


class ExportLine(Answer):
    """A line of what POST /export answers; ``num_bytes`` raw bytes of a stage's state follow it.

    ``begin`` tells of what; ``piece`` brings bytes, void what came of the stage before if it
    ``is_first``; ``stage`` ends a stage with the digest of its state.
    """

    kind: Literal["begin", "piece", "stage", "end", "error"]
    step: int = 0
    manifest: str = ""
    tokenizer: str = ""
    separator: int = 0
    separator_name: str | None = None
    stage: int = 0
    is_first: bool = False
    num_bytes: int = 0
    digest: str = ""
    error: ErrorAnswer | None = None
