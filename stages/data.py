"""The data node's text as one row of tokens, drawn from by (seed, step, slot).

Documents are packed one after another, each followed by the separator. A document is held out
for validation if its hash says so: the same document is held out on every data node, whatever
else it has. The recipe:

1. a document is held out if int(first 8 bytes of SHA-256("{seed}/" + content), big-endian)
   / 2^64 < validation_fraction; if none or all are, the one with the lowest (highest) hash
   changes sides. Fewer than 20 documents are first cut into about 100 pieces.
2. sequence b of microbatch (step, slot) starts at token int(first 8 bytes of
   SHA-256("{seed}/{step}/{slot}/{b}"), big-endian) mod (n - T) of the n training tokens and has
   T + 1 tokens.
3. held-out microbatches are consecutive windows; they start again when the tokens end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import ConfigError
from protocol.manifest import Manifest
from stages.sources import divide_if_few, read_documents, standard_library_documents
from stages.tokenizer import Tokenizer, make_tokenizer

Tokens = NDArray[np.generic]
_DENSE_PAIRS = 2**22  # up to here a table of all pairs of tokens is faster than sorting


class Corpus:
    """Packed tokens for training and for validation, drawn as windows [B, T + 1]."""

    def __init__(
        self, documents: Sequence[bytes], tokenizer: Tokenizer, manifest: Manifest
    ) -> None:
        data, self._vocabulary = manifest.data, manifest.model.vocabulary
        self.tokenizer = tokenizer
        self._seed = data.seed
        self._num_sequences = manifest.training.microbatch
        self._num_tokens = manifest.model.context
        train, held_out = split_documents(documents, data.seed, data.validation_fraction)
        self._train = self._pack(train)
        self._held_out = self._pack(held_out)
        self._check_length("training", self._train)
        if data.eval_every:
            self._check_length("validation", self._held_out)

    @property
    def num_train_tokens(self) -> int:
        """Tokens to draw from, separators included."""
        return len(self._train)

    @property
    def num_validation_tokens(self) -> int:
        """Held-out tokens, separators included."""
        return len(self._held_out)

    def draw(self, step: int, slot: int) -> torch.Tensor:
        """Return the int64 window [B, T + 1] of a training microbatch, always the same."""
        num_starts = len(self._train) - self._num_tokens
        return self._windows(
            self._train,
            [
                _number(f"{self._seed}/{step}/{slot}/{row}".encode()) % num_starts
                for row in range(self._num_sequences)
            ],
        )

    def validation(self, index: int) -> torch.Tensor:
        """Return the int64 window [B, T + 1] of the ``index``-th held-out microbatch."""
        self._check_length("validation", self._held_out)
        num_windows = (len(self._held_out) - 1) // self._num_tokens
        first = index * self._num_sequences
        rows = range(first, first + self._num_sequences)
        return self._windows(self._held_out, [row % num_windows * self._num_tokens for row in rows])

    def unigram_entropy(self) -> float:
        """Entropy of a training token in nats: the loss of knowing frequencies alone."""
        return _entropy(np.bincount(self._train))

    def bigram_entropy(self) -> float:
        """Entropy of a training token in nats given the one before it: H(x_t | x_t-1)."""
        before, after = self._train[:-1].astype(np.int64), self._train[1:].astype(np.int64)
        pairs = before * self._vocabulary + after
        if self._vocabulary**2 <= _DENSE_PAIRS:
            counts = np.bincount(pairs)
        else:
            counts = np.unique(pairs, return_counts=True)[1]
        return _entropy(counts) - _entropy(np.bincount(before))

    def _pack(self, documents: Sequence[bytes]) -> Tokens:
        dtype = np.uint16 if self._vocabulary <= 2**16 else np.int32
        separator = np.array([self.tokenizer.separator], dtype=dtype)
        parts: list[Tokens] = [np.empty(0, dtype=dtype)]
        for tokens in self.tokenizer.encode_all(documents):
            parts += [tokens, separator]
        return np.concatenate(parts).astype(dtype)

    def _windows(self, tokens: Tokens, starts: Sequence[int]) -> torch.Tensor:
        rows = [tokens[start : start + self._num_tokens + 1] for start in starts]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def _check_length(self, purpose: str, tokens: Tokens) -> None:
        if len(tokens) <= self._num_tokens:
            raise ConfigError(
                f"{len(tokens)} tokens of {purpose} text are too few for a context of "
                f"{self._num_tokens}",
                f"Give text with more than {self._num_tokens} tokens of it in the {purpose} part, "
                "or change data.validation_fraction in the manifest.",
            )


def load_corpus(
    manifest: Manifest, paths: Sequence[Path] = (), tokenizer_file: Path | None = None
) -> Corpus:
    """Read text files, folders and .jsonl; without paths, Python's standard library.

    Raises ConfigError for what is missing, not text, or too short.
    """
    documents = read_documents(paths) if paths else standard_library_documents()
    return Corpus(documents, make_tokenizer(manifest.model, tokenizer_file), manifest)


def split_documents(
    documents: Sequence[bytes], seed: int, fraction: float
) -> tuple[list[bytes], list[bytes]]:
    """Return (training, held out) documents, each in the order given."""
    if not fraction:
        return list(documents), []
    documents = divide_if_few(list(documents))
    salt = f"{seed}/".encode()
    marks = [_number(salt + document) for document in documents]
    # The lowest is always held out and the highest never, so that neither side is empty.
    limit = min(max(fraction * 2**64, min(marks) + 1), max(marks))
    train = [d for d, mark in zip(documents, marks, strict=True) if mark >= limit]
    return train, [d for d, mark in zip(documents, marks, strict=True) if mark < limit]


def _number(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:8], "big")


def _entropy(counts: NDArray[np.int64]) -> float:
    counts = counts[counts > 0]
    total = float(counts.sum())
    return math.log(total) - float((counts * np.log(counts)).sum()) / total
