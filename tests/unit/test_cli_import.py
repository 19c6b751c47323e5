"""`shoal import`: what it writes, and that a mistake leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from stages_kit import make_manifest
from test_stages_hf import save_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cli.main import run
from node.config import load_config
from node.initial import FileInitialWeights, initial_file
from node.paths import StatePaths
from protocol.manifest import SignedManifest
from stages.layout import stage_layout

MANIFEST = make_manifest()


def imported(folder: Path, root: Path, *options: str) -> int:
    words = ["import", str(folder), str(root / "m.toml"), "--state", str(root / "state")]
    return run([*words, "--stages", "2", *options])


def test_manifest_and_weights_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path / "hf", MANIFEST)
    assert imported(tmp_path / "hf", tmp_path, "--json", "--steps", "7") == 0
    told = json.loads(capsys.readouterr().out)
    paths = StatePaths(tmp_path / "state")
    manifest = SignedManifest.from_toml((tmp_path / "m.toml").read_text()).verify()
    assert manifest.swarm_id == told["swarm"]
    assert paths.manifest.read_text() == (tmp_path / "m.toml").read_text()
    assert (manifest.model, manifest.training.steps) == (MANIFEST.model, 7)
    assert len(manifest.initial) == 3
    for stage in range(3):
        names = {parameter.name for parameter in stage_layout(manifest, stage).parameters}
        assert set(load_file(initial_file(paths.initial, stage))) == names


async def test_the_weights_are_read_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.initial.CHUNK_BYTES", 7)
    initial_file(tmp_path, 1).write_bytes(bytes(range(20)))
    disk = FileInitialWeights(tmp_path)
    pieces = [await disk.chunk(1, number) for number in range(4)]
    assert [(piece[0], len(piece[1])) for piece in pieces if piece] == [(3, 7), (3, 7), (3, 6)]
    assert pieces[3] is None
    assert await disk.chunk(2, 0) is None


def test_a_tokenizer_file_is_kept_for_the_node(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", MANIFEST)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    (tmp_path / "hf" / "tokenizer.json").write_text(words.to_str())
    assert imported(tmp_path / "hf", tmp_path, "--context", "6") == 0
    paths = StatePaths(tmp_path / "state")
    manifest = SignedManifest.from_toml(paths.manifest.read_text()).manifest
    assert (manifest.model.tokenizer, manifest.model.context) == ("file", 6)
    assert load_config(paths.config).config.tokenizer == paths.tokenizer
    assert paths.tokenizer.read_text() == words.to_str()


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def with_bias(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mlp_bias": True}))


@pytest.mark.parametrize("harm", [without_tokenizer, without_weights, with_bias])
def test_a_mistake_leaves_nothing(harm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(tmp_path / "hf", MANIFEST)
    harm(tmp_path / "hf")
    assert imported(tmp_path / "hf", tmp_path) == 2
    assert "error[config]" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_stages_that_do_not_divide_the_layers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(tmp_path / "hf", MANIFEST)
    assert imported(tmp_path / "hf", tmp_path, "--stages", "3") == 2
    assert "4 layers cannot be split into 3" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
