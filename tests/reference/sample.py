"""Text for tests: sentences of a small language, the same everywhere."""

from __future__ import annotations

import random
from pathlib import Path

_SYLLABLES = ("ka", "lo", "mi", "ter", "sun", "ve", "ra", "ol", "in", "sta")


def sample_documents(count: int = 40, words: int = 150, seed: int = 0) -> list[bytes]:
    """Documents of made-up words, frequent ones first, in lines of ten."""
    choose = random.Random(seed)
    lexicon = ["".join(choose.choices(_SYLLABLES, k=choose.randint(1, 3))) for _ in range(120)]
    weights = [1 / rank for rank in range(1, len(lexicon) + 1)]
    documents = []
    for _ in range(count):
        drawn = choose.choices(lexicon, weights, k=words)
        lines = [" ".join(drawn[start : start + 10]) for start in range(0, words, 10)]
        documents.append(".\n".join(lines).encode() + b".\n")
    return documents


def write_documents(folder: Path, documents: list[bytes]) -> Path:
    """Write one file per document, named in their order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, document in enumerate(documents):
        (folder / f"{number:04d}.txt").write_bytes(document)
    return folder
