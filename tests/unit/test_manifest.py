"""The manifest: its hash, its signature, its TOML, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol.errors import ConfigError, VersionMismatch
from protocol.keys import NodeKey
from protocol.manifest import (
    Manifest,
    PipelineSpec,
    SignedManifest,
    TrainingSpec,
    learning_rate,
    sign,
)

KEY = NodeKey(bytes(32))
OTHER = NodeKey(bytes([1]) * 32)
# Changing it changes the id of every swarm: only together with PROTOCOL_VERSION.
GOLDEN_SWARM_ID = "b18d7abb484608989be533892c5d767f79372465264db6d5dda6fd12213cad5b"


def tables(**changes: Any) -> dict[str, Any]:
    """A small manifest; ``model__width=3`` changes a field of a table."""
    made: dict[str, Any] = {
        "name": "test",
        "organiser": KEY.peer_id,
        "model": {
            "layers": 6, "width": 64, "heads": 4, "kv_heads": 2,
            "feed_forward": 128, "vocabulary": 257, "context": 64,
        },
        "pipeline": {"stages": 3},
        "training": {"steps": 20, "quota": 8, "microbatch": 2},
    }  # fmt: skip
    for path, value in changes.items():
        *outer, name = path.split("__")
        place = made
        for table in outer:
            place = place.setdefault(table, {})
        place[name] = value
    return made


def manifest(**changes: Any) -> Manifest:
    return Manifest.from_tables(tables(**changes))


def test_the_hash_is_stable() -> None:
    assert manifest().swarm_id == GOLDEN_SWARM_ID


def test_whole_numbers_for_real_ones_do_not_change_the_hash() -> None:
    assert manifest(model__rope_base=10000).swarm_id == manifest().swarm_id


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"model__context": 65},
        {"pipeline__stages": (2, 2, 2)},
        {"training__optimizer__beta2": 0.96},
        {"data__seed": 1},
        {"authorities": (KEY.peer_id, OTHER.peer_id)},
    ],
)
def test_every_field_is_part_of_the_hash(change: dict[str, Any]) -> None:
    assert manifest(**change).swarm_id != manifest().swarm_id


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"pipeline__stages": [1, 2, 3], "pipeline__wire_dtype": "bfloat16"},
        {"model__tokenizer": "file", "model__tokenizer_sha256": "ab" * 32},
        {"training__optimizer__epsilon": 1e-12, "training__schedule__kind": "cosine"},
    ],
)
def test_toml_gives_the_same_manifest_back(change: dict[str, Any]) -> None:
    made = manifest(**change)
    assert Manifest.from_toml(made.to_toml()) == made
    signed = sign(made, KEY)
    read = SignedManifest.from_toml(signed.to_toml())
    assert read == signed
    assert read.verify(made.swarm_id).canonical == made.canonical


def test_the_organiser_decides_alone_by_default() -> None:
    assert manifest().authorities == (KEY.peer_id,)


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        manifest().name = "other"  # type: ignore[misc]


def test_a_tampered_manifest_is_refused() -> None:
    text = sign(manifest(), KEY).to_toml()
    tampered = text.replace("quota = 8", "quota = 9")
    assert tampered != text
    with pytest.raises(ConfigError, match="not signed by its organiser"):
        SignedManifest.from_toml(tampered).verify()


def test_anothers_signature_is_refused() -> None:
    signature = OTHER.sign(manifest().canonical)
    with pytest.raises(ConfigError, match="not signed by its organiser"):
        SignedManifest(manifest=manifest(), signature=signature).verify()


def test_a_bare_signature_of_the_bytes_is_refused() -> None:
    """Without the prefix, a signature made for another purpose would serve here."""
    signed = SignedManifest(manifest=manifest(), signature=KEY.sign(manifest().canonical))
    with pytest.raises(ConfigError):
        signed.verify()


def test_another_swarms_manifest_is_refused() -> None:
    with pytest.raises(ConfigError, match="of swarm"):
        sign(manifest(), KEY).verify("ab" * 32)


def test_only_the_organiser_can_sign() -> None:
    with pytest.raises(ConfigError, match=OTHER.peer_id):
        sign(manifest(), OTHER)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("name = ", "not TOML"),
        ('name = "x"\n', "not signed"),
        ('signature = "xyz"\n', "not hexadecimal"),
        ("signature = 5\n", "not hexadecimal"),
        ('signature = "abcd"\n', "2 bytes"),
    ],
)
def test_bad_text_is_named(text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        SignedManifest.from_toml(text)


def test_another_protocol_is_told_before_its_unknown_fields() -> None:
    text = "protocol_version = 2\n" + 'news = "?"\n'
    with pytest.raises(VersionMismatch, match="protocol 2"):
        SignedManifest.from_toml(text)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"model__width": 66}, "width 66 is not a multiple of heads 4"),
        ({"model__kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"model__width": 12}, "rotary positions need it even"),
        ({"model__context": 0}, "model.context"),
        ({"model__vocabulary": 255}, "too small for bytes"),
        ({"model__tokenizer": "file"}, "tokenizer_sha256"),
        ({"model__tokenizer_sha256": "ab" * 32}, "tokenizer_sha256"),
        ({"model__dtype": "int8"}, "model.dtype"),
        ({"pipeline__stages": 4}, "6 layers cannot be split into 4 equal stages"),
        ({"pipeline__stages": (1, 2)}, "the stages hold 3 layers, the model has 6"),
        ({"pipeline__stages": (6, 0)}, "pipeline.stages"),
        ({"pipeline__min_holders": 0}, "pipeline.min_holders"),
        ({"training__quota": 0}, "training.quota"),
        ({"training__optimizer__learning_rate": math.inf}, "training.optimizer.learning_rate"),
        ({"training__optimizer__beta1": 1.0}, "training.optimizer.beta1"),
        ({"training__schedule__warmup_steps": 21}, "warmup_steps 21 exceeds the 20 steps"),
        ({"data__validation_fraction": 0}, "eval_every needs"),
        ({"authorities": ()}, "authorities"),
        ({"authorities": (KEY.peer_id, KEY.peer_id)}, "named twice"),
        ({"authorities": ("nobody",)}, "authorities.0"),
        ({"organiser": "12D3"}, "organiser"),
        ({"averaging": "rough"}, "averaging"),
        ({"training__sums": "random"}, "training.sums"),
        ({"averaging": "hivemind", "training__sums": "slots"}, "sums by slot need exact"),
        ({"name": "two words"}, "name"),
        ({"extra": 1}, "extra"),
        ({"model__extra": 1}, "model.extra"),
    ],
)
def test_nonsense_is_refused_and_named(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        manifest(**change)
    assert cause in caught.value.cause
    assert "\n" not in caught.value.cause


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_stages_partition_the_layers_in_order(listed: list[int], equal: int) -> None:
    for pipeline, layers in (
        (PipelineSpec(stages=tuple(listed)), sum(listed)),
        (PipelineSpec(stages=equal), 3 * equal),
    ):
        parts = [pipeline.layers_of(k, layers) for k in range(1, pipeline.num_stages + 1)]
        assert [layer for part in parts for layer in part] == list(range(layers))


@pytest.mark.parametrize("stage", [0, 4])
def test_stage_zero_and_beyond_have_no_layers(stage: int) -> None:
    with pytest.raises(IndexError):
        PipelineSpec(stages=3).layers_of(stage, 6)


def training(kind: str, warmup: int, final: float = 0.1) -> TrainingSpec:
    schedule = {"kind": kind, "warmup_steps": warmup, "final_fraction": final}
    optimizer = {"learning_rate": 2.0}
    fields = {"steps": 12, "quota": 1, "microbatch": 1}
    return TrainingSpec.model_validate({**fields, "schedule": schedule, "optimizer": optimizer})


def test_warm_up_rises_evenly_to_the_peak() -> None:
    spec = training("cosine", 4)
    assert [learning_rate(spec, step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize(
    ("kind", "halfway", "end"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)]
)
def test_schedules_reach_their_end(kind: str, halfway: float, end: float) -> None:
    spec = training(kind, 2)
    assert learning_rate(spec, 2) == 2.0
    assert learning_rate(spec, 7) == pytest.approx(halfway)
    assert learning_rate(spec, 12) == pytest.approx(end)
    assert learning_rate(spec, 99) == pytest.approx(end)


def test_cosine_is_above_linear_early_and_below_late() -> None:
    linear, cosine = training("linear", 0, 0.0), training("cosine", 0, 0.0)
    assert learning_rate(cosine, 3) > learning_rate(linear, 3)
    assert learning_rate(cosine, 9) < learning_rate(linear, 9)


def test_a_schedule_that_is_all_warm_up_is_defined() -> None:
    assert learning_rate(training("linear", 12), 11) == 2.0
    assert learning_rate(training("linear", 12), 12) == 2.0


def test_settings_at_their_later_defaults_change_no_hash() -> None:
    """Swarms that are older than a setting keep their id and their signature."""
    plain = manifest()
    assert b'"export"' not in plain.canonical
    assert b'"initial"' not in plain.canonical
    for change in ({"export": "nobody"}, {"initial": ("ab" * 32,) * (plain.num_stages + 1)}):
        changed = Manifest.model_validate({**plain.model_dump(), **change})
        assert changed.swarm_id != plain.swarm_id
        assert Manifest.from_toml(changed.to_toml()) == changed


def test_each_stage_needs_its_initial_weights() -> None:
    plain = manifest()
    with pytest.raises(ValidationError, match="initial names 1 digests"):
        Manifest.model_validate({**plain.model_dump(), "initial": ("ab" * 32,)})
