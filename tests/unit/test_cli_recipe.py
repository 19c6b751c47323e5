"""The default manifest, its comments, and signing it again after an edit."""

from __future__ import annotations

import pytest

from cli.recipe import Recipe, commented, num_parameters, resigned
from protocol.errors import ConfigError
from protocol.keys import NodeKey
from protocol.manifest import SignedManifest, sign

KEY = NodeKey(b"k" * 32)


def written(recipe: Recipe | None = None) -> str:
    return commented(sign((recipe or Recipe()).manifest((KEY.peer_id,)), KEY))


def test_comments_do_not_change_the_manifest() -> None:
    text = written()
    assert "  # " in text
    assert SignedManifest.from_toml(text).verify() == Recipe().manifest((KEY.peer_id,))


def test_every_choice_reaches_the_manifest() -> None:
    recipe = Recipe("n", 8, 64, 2, 32, 4, 3, 2, 30, 5, 2, 1e-2, 9, "bfloat16")
    manifest = recipe.manifest((KEY.peer_id,))
    model, pipeline, training = manifest.model, manifest.pipeline, manifest.training
    assert (manifest.name, model.layers, model.width, model.heads) == ("n", 8, 64, 2)
    assert (model.context, pipeline.stages) == (32, 4)
    assert (pipeline.min_holders, pipeline.min_data_nodes) == (3, 2)
    assert (training.steps, training.quota, training.microbatch) == (30, 5, 2)
    assert (training.optimizer.learning_rate, training.seed, manifest.data.seed) == (1e-2, 9, 9)
    assert pipeline.wire_dtype == "bfloat16"


def test_editing_and_signing_again_keeps_the_persons_text() -> None:
    before = written()
    edited = before.replace("steps = 60", "steps = 90  # longer")
    with pytest.raises(ConfigError, match="signed"):
        SignedManifest.from_toml(edited).verify()
    text, signed = resigned(edited, KEY)
    assert "steps = 90  # longer" in text
    assert SignedManifest.from_toml(text).verify().training.steps == 90
    assert signed.manifest.swarm_id != SignedManifest.from_toml(before).manifest.swarm_id
    assert len(text.splitlines()) == len(before.splitlines())


def test_an_unsigned_file_is_signed() -> None:
    text, _ = resigned(Recipe().manifest((KEY.peer_id,)).to_toml(), KEY)
    assert SignedManifest.from_toml(text).verify() == Recipe().manifest((KEY.peer_id,))


def test_another_key_cannot_sign() -> None:
    with pytest.raises(ConfigError, match="organiser"):
        resigned(written(), NodeKey(b"x" * 32))


def test_wrong_choices_are_named() -> None:
    with pytest.raises(ConfigError, match="7 layers cannot be split into 3 equal stages") as caught:
        Recipe(layers=7).manifest((KEY.peer_id,))
    assert caught.value.hint == "Change --layers or --stages; --help explains each."
    with pytest.raises(ConfigError, match="wire_dtype") as caught:
        Recipe(wire_dtype="foo").manifest((KEY.peer_id,))
    assert caught.value.hint == "Change --wire-dtype; --help explains each."


def test_number_of_parameters() -> None:
    manifest = Recipe(layers=1, width=8, heads=2, stages=1).manifest((KEY.peer_id,))
    # q and o 8x8, k and v 4x8, three of 32x8, embedding and head 257x8
    assert manifest.model.feed_forward == 32
    assert num_parameters(manifest) == 2 * 64 + 2 * 32 + 3 * 256 + 2 * 257 * 8
