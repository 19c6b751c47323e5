"""The tables of the manifest: frozen models that refuse unknown fields.

A node that does not know a setting must not guess what it means.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from protocol.errors import ConfigError
from protocol.keys import PeerId, public_of
from protocol.manifest.toml import explain, read_tables
from protocol.messages import PROTOCOL_VERSION

_LATER = ("export", "initial", "recovery")
_MAX_STAGES = 4095  # stage 0 and stages 1..4095 fit the messages' stage field


def _checked_peer(value: PeerId) -> PeerId:
    public_of(value)
    return value


Peer = Annotated[PeerId, AfterValidator(_checked_peer)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
NumSteps = Annotated[int, Field(ge=1, lt=2**40)]


class Spec(BaseModel):
    """What every table of the manifest shares."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelSpec(Spec):
    """The shape of the LLaMA-style model."""

    layers: Annotated[int, Field(ge=1, le=_MAX_STAGES)]
    width: Annotated[int, Field(ge=2, le=2**17)]
    heads: Annotated[int, Field(ge=1, le=2**12)]
    kv_heads: Annotated[int, Field(ge=1, le=2**12)]
    feed_forward: Annotated[int, Field(ge=1, le=2**20)]
    vocabulary: Annotated[int, Field(ge=2, le=2**24)]
    context: Annotated[int, Field(ge=1, le=2**20)]
    rope_base: Positive = 10000.0
    norm_epsilon: Positive = 1e-5
    dtype: Literal["float32"] = "float32"
    tokenizer: Literal["bytes", "file"] = "bytes"
    tokenizer_sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _shape_divides(self) -> ModelSpec:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"width / heads is {self.head_width}; rotary positions need it even")
        return self

    @model_validator(mode="after")
    def _tokenizer_is_named(self) -> ModelSpec:
        if self.tokenizer == "bytes" and self.vocabulary < 256:
            raise ValueError(f"vocabulary {self.vocabulary} is too small for bytes: at least 256")
        if (self.tokenizer == "file") != (self.tokenizer_sha256 is not None):
            raise ValueError("tokenizer_sha256 belongs to tokenizer 'file', and to it alone")
        return self

    @property
    def head_width(self) -> int:
        """The number of channels of one attention head."""
        return self.width // self.heads


class PipelineSpec(Spec):
    """How the layers are cut into stages 1..S, and how activations cross between them."""

    stages: (
        Annotated[int, Field(ge=1, le=_MAX_STAGES)]
        | Annotated[
            tuple[Annotated[int, Field(ge=1, le=_MAX_STAGES)], ...],
            Field(min_length=1, max_length=_MAX_STAGES),
        ]
    )
    wire_dtype: Literal["float32", "bfloat16"] = "float32"
    min_holders: Annotated[int, Field(ge=1, le=4096)] = 1  # of each stage, to start
    min_data_nodes: Annotated[int, Field(ge=1, le=4096)] = 1  # to start

    @property
    def num_stages(self) -> int:
        """The number of transformer stages; stage 0, the data node, is not among them."""
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    def layers_of(self, stage: int, layers: int) -> range:
        """Return the layers of ``stage`` (1..S) in a model of ``layers``; IndexError otherwise."""
        if not 1 <= stage <= self.num_stages:
            raise IndexError(f"stage {stage} is not one of 1..{self.num_stages}")
        if isinstance(self.stages, int):
            share = layers // self.stages
            return range((stage - 1) * share, stage * share)
        ends = (0, *accumulate(self.stages))
        return range(ends[stage - 1], ends[stage])

    def check(self, layers: int) -> None:
        """Raise ValueError unless the stages make up exactly ``layers`` layers."""
        if isinstance(self.stages, int):
            if layers % self.stages:
                raise ValueError(
                    f"{layers} layers cannot be split into {self.stages} equal stages; "
                    "list the layers per stage instead"
                )
        elif sum(self.stages) != layers:
            raise ValueError(f"the stages hold {sum(self.stages)} layers, the model has {layers}")


class OptimizerSpec(Spec):
    """The optimiser of every stage; a field that the named one does not use is ignored."""

    name: Literal["adamw", "axis_adamw", "sgd", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.1
    momentum: Decay = 0.9


class ScheduleSpec(Spec):
    """The course of the learning rate over the steps."""

    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0, lt=2**40)] = 0
    final_fraction: Fraction = 0.1


class TrainingSpec(Spec):
    """When training ends and what one step is: ``quota`` microbatches of ``microbatch`` rows."""

    steps: NumSteps
    quota: Annotated[int, Field(ge=1, le=2**20)]
    microbatch: Annotated[int, Field(ge=1, le=2**16)]
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    clip_norm: NotNegative = 0.0  # per stage; 0 clips nothing
    # "slots" adds gradients in the order of their slots, whoever computed them: the same bits in
    # every run, for a gradient's memory and a part's traffic per slot.
    sums: Literal["arrival", "slots"] = "arrival"
    seed: Seed = 0

    @model_validator(mode="after")
    def _warmup_ends(self) -> TrainingSpec:
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.schedule.warmup_steps} exceeds the {self.steps} steps"
            )
        return self


class DataSpec(Spec):
    """How every data node draws its microbatches and when the swarm validates."""

    seed: Seed = 0
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    eval_every: Annotated[int, Field(ge=0, lt=2**40)] = 10  # steps; 0 never validates
    eval_microbatches: Annotated[int, Field(ge=1, le=2**16)] = 4

    @model_validator(mode="after")
    def _validation_has_data(self) -> DataSpec:
        if self.eval_every and not self.validation_fraction:
            raise ValueError("eval_every needs a validation_fraction above 0")
        return self


class RecoverySpec(Spec):
    """What becomes of a stage whose last holder died (CheckFree, arXiv 2506.15461)."""

    # "checkfree" puts an interior stage together from its neighbours; "checkfree_plus" also swaps
    # the first and the last two stages in half of the microbatches, so that the ends have twins.
    method: Literal["none", "checkfree", "checkfree_plus"] = "none"
    omega_mode: Literal["sq", "l2", "uniform"] = "sq"  # a neighbour's weight, by its gradient norm
    lr_scale: Annotated[float, Field(ge=0.1, le=10)] = 1.1  # of a rebuilt stage, from then on
    # Holders beside stage 0 keep a copy of embedding and head. They can then read the text.
    share_ends: bool = False

    def check(self, stage_layers: Sequence[int]) -> None:
        """Raise ValueError unless stages of so many layers each can be rebuilt by ``method``."""
        least = {"none": 1, "checkfree": 3, "checkfree_plus": 4}[self.method]
        if len(stage_layers) < least:
            raise ValueError(
                f"recovery {self.method!r} needs at least {least} stages, not {len(stage_layers)}"
            )
        if self.method != "none" and len(set(stage_layers)) > 1:
            raise ValueError(
                f"recovery {self.method!r} puts a stage's layers together from its neighbours': "
                f"all stages need equally many, not {list(stage_layers)}"
            )


class Manifest(Spec):
    """One swarm, in full. Two manifests with the same ``swarm_id`` are the same swarm."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    protocol_version: Annotated[int, Field(ge=1)] = PROTOCOL_VERSION
    organiser: Peer
    authorities: Annotated[tuple[Peer, ...], Field(min_length=1, max_length=64)] = ()
    model: ModelSpec
    pipeline: PipelineSpec
    training: TrainingSpec
    data: DataSpec = DataSpec()
    averaging: Literal["exact", "hivemind"] = "exact"
    recovery: RecoverySpec = RecoverySpec()
    # who may put the stages together into one model on a disk
    export: Literal["nobody", "organiser", "authorities", "data_nodes"] = "authorities"
    # SHA-256 of the weights with which each stage begins, stage 0 first; () draws them by the seed
    initial: tuple[Sha256, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _organiser_decides_alone_by_default(cls, data: Any) -> Any:
        if isinstance(data, dict) and "authorities" not in data and "organiser" in data:
            return {**data, "authorities": (data["organiser"],)}
        return data

    @model_validator(mode="after")
    def _parts_agree(self) -> Manifest:
        if len(set(self.authorities)) != len(self.authorities):
            raise ValueError("an authority is named twice")
        if self.training.sums == "slots" and self.averaging != "exact":
            raise ValueError("sums by slot need exact averaging")
        if self.initial and len(self.initial) != self.pipeline.num_stages + 1:
            raise ValueError(
                f"initial names {len(self.initial)} digests, not one for each of stages "
                f"0..{self.pipeline.num_stages}"
            )
        self.pipeline.check(self.model.layers)
        stages = range(1, self.pipeline.num_stages + 1)
        self.recovery.check([len(self.pipeline.layers_of(k, self.model.layers)) for k in stages])
        return self

    @property
    def num_stages(self) -> int:
        """The number of transformer stages S."""
        return self.pipeline.num_stages

    def may_export(self, peer: PeerId, *, is_data_node: bool) -> bool:
        """Whether a node may put the whole model together."""
        allowed = {"organiser": (self.organiser,), "authorities": self.authorities}
        if self.export == "data_nodes":
            return is_data_node
        return peer in allowed.get(self.export, ())

    @property
    def _unsaid(self) -> set[str]:
        """Settings younger than the first swarms: left at their default, they change no hash."""
        fields = type(self).model_fields
        return {name for name in _LATER if getattr(self, name) == fields[name].default}

    @cached_property
    def canonical(self) -> bytes:
        """The bytes that are hashed and signed: compact JSON with sorted keys."""
        plain = self.model_dump(mode="json", exclude=self._unsaid)
        return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()

    @cached_property
    def swarm_id(self) -> str:
        """The SHA-256 (hex) of the canonical bytes."""
        return sha256(self.canonical).hexdigest()

    def to_toml(self) -> str:
        """Return the manifest as TOML; ``from_toml`` of it is equal."""
        unsaid = set() if self.initial else {"initial"}
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True, exclude=unsaid))

    @classmethod
    def from_toml(cls, text: str) -> Manifest:
        """Read an unsigned manifest; raise ConfigError that names each wrong field."""
        return cls.from_tables(read_tables(text))

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> Manifest:
        """Validate parsed TOML; raise ConfigError that names each wrong field."""
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            raise ConfigError(
                f"the manifest is wrong: {explain(error)}", "Correct the manifest file."
            ) from error
