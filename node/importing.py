"""A model of Hugging Face's becomes the beginning of a swarm: its weights, and its tokenizer."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from node.initial import initial_file
from node.paths import StatePaths
from protocol.errors import ConfigError, ResourceError
from protocol.manifest import Manifest
from stages.hf_import import LlamaFolder
from stages.tokenizer import ByteTokenizer, FileTokenizer

Tell = Callable[[str], None]


@dataclass
class Imported:
    """What a folder gives a manifest: its [model] table, and a digest for each stage."""

    model: dict[str, object]
    tokenizer: str | None  # the content of its file; None for bytes
    initial: tuple[str, ...] = ()
    files: Path | None = field(default=None)  # where the weights lie until they are kept


def read_shape(folder: Path) -> Imported:
    """Read config and tokenizer; raise ConfigError."""
    model = LlamaFolder(folder).model_tables()
    text = _tokenizer_text(folder)
    vocabulary = model["vocabulary"]
    assert isinstance(vocabulary, int)
    if vocabulary > 255 and text == ByteTokenizer(vocabulary).to_json():
        return Imported({**model, "tokenizer": "bytes"}, None)
    digest = sha256(text.encode()).hexdigest()
    FileTokenizer(folder / "tokenizer.json", digest, vocabulary)
    return Imported({**model, "tokenizer": "file", "tokenizer_sha256": digest}, text)


def _tokenizer_text(folder: Path) -> str:
    path = folder / "tokenizer.json"
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}",
            "Save the tokenizer there with `transformers`: tokenizer.save_pretrained(DIR).",
        ) from error


@contextmanager
def written_weights(
    paths: StatePaths, folder: Path, manifest: Manifest, imported: Imported, tell: Tell
) -> Iterator[None]:
    """Write each stage's weights beside where they will lie; ``keep_weights`` puts them there.

    Raises ConfigError if the folder does not hold what its config says, or ResourceError.
    """
    was_there = paths.root.exists()
    paths.create()
    draft = paths.initial.with_name(f"{paths.initial.name}.{secrets.token_hex(4)}")
    try:
        with _explained(paths), LlamaFolder(folder) as llama:
            llama.check(manifest)
            draft.mkdir(mode=0o700)
            digests = []
            for stage in range(manifest.num_stages + 1):
                digests.append(llama.write_stage(manifest, stage, initial_file(draft, stage)))
                tell(f"stage {stage} of {manifest.num_stages}")
        imported.initial, imported.files = tuple(digests), draft
        yield
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if not was_there and not any(paths.root.iterdir()):
            paths.root.rmdir()


def keep_weights(paths: StatePaths, imported: Imported) -> None:
    """Put weights and tokenizer where the node looks for them; raise ResourceError."""
    assert imported.files is not None
    with _explained(paths):
        if imported.tokenizer is not None:
            paths.tokenizer.write_text(imported.tokenizer)
        if paths.initial.exists():
            shutil.rmtree(paths.initial)
        imported.files.replace(paths.initial)


@contextmanager
def _explained(paths: StatePaths) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write into {paths.root}: {error.strerror or error}",
            "Free disk space, or name another directory with --state.",
        ) from error
