"""The manifest that `shoal swarm create` and `shoal demo` start from, and its comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from protocol.errors import ConfigError
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest, SignedManifest, sign

_COMMENTS = {
    "organiser": "the PeerID whose key signs this file",
    "authorities": "the data nodes that decide, by majority, who belongs to a step",
    "export": 'who may write the whole model: "nobody", "organiser", "authorities", "data_nodes"',
    "averaging": 'how replicas of a stage agree: "exact", or "hivemind" for large groups',
    "width": "channels between layers; a multiple of heads",
    "kv_heads": "heads of keys and values; a divisor of heads",
    "context": "tokens per sequence",
    "tokenizer": '"bytes", or "file" with tokenizer_sha256 of a tokenizer.json',
    "stages": "equal parts, or a list of layers per stage; each part fits one volunteer",
    "wire_dtype": 'how activations cross: "float32", or "bfloat16" for half the traffic',
    "min_holders": "holders that every stage needs before training starts",
    "min_data_nodes": "data nodes that it needs, too",
    "steps": "training ends after so many optimiser steps",
    "quota": "microbatches per step, of the whole swarm",
    "microbatch": "sequences per microbatch",
    "clip_norm": "largest gradient norm of a stage; 0 clips nothing",
    "sums": 'order of adding gradients: "arrival", or "slots" for the same bits in every run',
    "learning_rate": "at its peak",
    "warmup_steps": "steps until the learning rate is at its peak",
    "final_fraction": "share of the peak learning rate at the end",
    "validation_fraction": "share of the documents that is held out",
    "method": 'when a stage has no holder left: "none" waits for one; see docs/recovery.md',
    "omega_mode": 'how its neighbours count when it is rebuilt: "sq", "l2", "uniform"',
    "lr_scale": "a rebuilt stage's learning rate, by the others'",
    "share_ends": "holders beside stage 0 keep a copy of it; they can then read the text",
    "eval_every": "steps between two validations; 0 for never",
}
_HEAD = (
    "# A Shoal swarm. Edit it, then sign it again: shoal swarm create THIS_FILE\n"
    "# The hash of the settings is the swarm's name to everybody: change one, and it is another.\n"
)
_SIGNATURE = re.compile(r'^signature = "[^"\n]*"\n', re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """The few choices of a small byte-level model; everything else follows."""

    name: str = "shoal"
    layers: int = 6
    width: int = 128
    heads: int = 4
    context: int = 128
    stages: int = 3
    holders: int = 1
    data_nodes: int = 1
    steps: int = 60
    quota: int = 16
    microbatch: int = 8
    learning_rate: float = 2e-3
    seed: int = 0
    wire_dtype: str = "float32"
    recovery: str = "none"

    def manifest(self, authorities: Sequence[PeerId]) -> Manifest:
        """Return the manifest of the organiser ``authorities[0]``; raise ConfigError."""
        try:
            return Manifest.from_tables(self.tables(authorities))
        except ConfigError as error:
            raise ConfigError(error.cause, _remedy(error.cause)) from error

    def tables(self, authorities: Sequence[PeerId]) -> dict[str, object]:
        """Return the manifest as tables."""
        return {
            "name": self.name,
            "organiser": authorities[0],
            "authorities": tuple(authorities),
            "model": self._model(),
            "pipeline": {
                "stages": self.stages,
                "wire_dtype": self.wire_dtype,
                "min_holders": self.holders,
                "min_data_nodes": self.data_nodes,
            },
            "training": self._training(),
            "recovery": {"method": self.recovery},
            "data": {"seed": self.seed, "eval_every": max(1, self.steps // 6)},
        }

    def _model(self) -> dict[str, object]:
        return {
            "layers": self.layers,
            "width": self.width,
            "heads": self.heads,
            "kv_heads": max(1, self.heads // 2),
            # 8/3 of the width, rounded up to 32 channels: SwiGLU has three matrices, not two.
            "feed_forward": -(-self.width * 8 // (3 * 32)) * 32,
            "vocabulary": 257,  # the bytes, and one to part documents
            "context": self.context,
        }

    def _training(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "quota": self.quota,
            "microbatch": self.microbatch,
            # A short training has no time for a long memory of gradients, nor for a noisy scale.
            "optimizer": {"learning_rate": self.learning_rate, "beta1": 0.8, "beta2": 0.99},
            "schedule": {"kind": "cosine", "warmup_steps": self.steps // 10},
            "clip_norm": 1.0,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class ImportedRecipe(Recipe):
    """The same choices for a model that is there already: its shape is not one of them."""

    model: Mapping[str, object] = field(default_factory=dict)
    initial: tuple[str, ...] = ()

    def tables(self, authorities: Sequence[PeerId]) -> dict[str, object]:
        """Return the manifest as tables."""
        return {**super().tables(authorities), "initial": self.initial}

    def _model(self) -> dict[str, object]:
        return dict(self.model)


def _remedy(cause: str) -> str:
    """Name the options that the cause is about: whoever gave them has no manifest to edit."""
    words = set(re.findall(r"\w+", cause))
    words.discard("heads")  # no option of the demo; the width, named with it, is
    named = [f"--{c.name.replace('_', '-')}" for c in fields(Recipe) if c.name in words]
    return f"Change {' or '.join(named) or 'the options'}; --help explains each."


def num_parameters(manifest: Manifest) -> int:
    """Return the number of weights of the whole model: blocks, embedding and head."""
    shape = manifest.model
    attention = 2 * shape.width * (shape.width + shape.kv_heads * shape.head_width)
    block = attention + 3 * shape.width * shape.feed_forward
    return shape.layers * block + 2 * shape.vocabulary * shape.width


def commented(signed: SignedManifest) -> str:
    """Return the signed manifest as TOML with a comment beside what a person may change."""
    return _HEAD + "\n".join(map(_with_comment, signed.to_toml().splitlines())) + "\n"


def _with_comment(line: str) -> str:
    comment = _COMMENTS.get(line.partition(" = ")[0])
    return f"{line}  # {comment}" if comment and not line.endswith("[") else line


def resigned(text: str, key: NodeKey) -> tuple[str, SignedManifest]:
    """Sign the settings in ``text``; return it with the new signature, all else untouched."""
    bare = _SIGNATURE.sub("", text, count=1)
    signed = sign(Manifest.from_toml(bare), key)
    line = f'signature = "{signed.signature.hex()}"\n'
    if bare == text:  # never signed before; a top-level key must stand before the first table
        return line + text, signed
    return _SIGNATURE.sub(line, text, count=1), signed
