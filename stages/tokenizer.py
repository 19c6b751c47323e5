"""Text to tokens and back: bytes, or a Hugging Face ``tokenizers`` file that the manifest names."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from protocol.errors import ConfigError
from protocol.manifest import ModelSpec

Tokens = NDArray[np.generic]
_SEPARATOR_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Text to tokens and back; ``separator`` is the token between documents."""

    separator: int

    @property
    def separator_name(self) -> str | None:
        """What the separator is called in ``to_json``; None if it is one of the text's bytes."""
        ...

    def to_json(self) -> str:
        """Return the same tokens as a ``tokenizer.json`` of Hugging Face's."""
        ...

    def encode_all(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each document (UTF-8)."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; what is not text becomes U+FFFD."""
        ...


class ByteTokenizer:
    """One token per byte; documents end with token 256, or with byte 0 if there is none."""

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 256:
            raise ConfigError(
                f"a vocabulary of {vocabulary} cannot hold all bytes",
                "Set model.vocabulary to 257 (or 256), or name a tokenizer file.",
            )
        self.separator = 256 if vocabulary > 256 else 0

    @property
    def separator_name(self) -> str | None:
        """The name of token 256, if there is one."""
        return _SEPARATOR_NAMES[0] if self.separator == 256 else None

    def to_json(self) -> str:
        """Return one that maps each byte to its number, with no merges."""
        letters = {letter: byte for byte, letter in _byte_letters().items()}
        whole = HuggingFaceTokenizer(BPE(vocab=letters, merges=[]))
        whole.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
        whole.decoder = ByteLevelDecoder()
        if self.separator_name is not None:
            whole.add_special_tokens([self.separator_name])
        return whole.to_str()

    def encode_all(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the bytes of each document."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a prompt."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; separators end lines, what is not UTF-8 becomes U+FFFD."""
        whole = bytes(10 if token == self.separator else token & 255 for token in tokens)
        return whole.decode(errors="replace")


class FileTokenizer:
    """A ``tokenizer.json`` of Hugging Face's tokenizers library."""

    def __init__(self, path: Path, digest: str | None, vocabulary: int) -> None:
        content = _content(path)
        if sha256(content).hexdigest() != digest:
            raise ConfigError(
                f"{path} is not the tokenizer of the manifest (SHA-256 differs)",
                "Get the tokenizer file from the organiser of the swarm.",
            )
        self._tokenizer = HuggingFaceTokenizer.from_str(content.decode())
        size = self._tokenizer.get_vocab_size()
        if size > vocabulary:
            raise ConfigError(
                f"{path} has {size} tokens, the model's vocabulary {vocabulary}",
                "The organiser must set model.vocabulary to at least the tokenizer's size.",
            )
        self._content = content.decode()
        ids = map(self._tokenizer.token_to_id, _SEPARATOR_NAMES)
        self.separator = next((token for token in ids if token is not None), 0)

    @property
    def separator_name(self) -> str | None:
        """How the file calls the separator."""
        name: str | None = self._tokenizer.id_to_token(self.separator)
        return name if name in _SEPARATOR_NAMES else None

    def to_json(self) -> str:
        """Return the file's content."""
        return self._content

    def encode_all(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Return the tokens of each document, without special tokens."""
        texts = [document.decode(errors="replace") for document in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text."""
        return str(self._tokenizer.decode(list(tokens)))


def _byte_letters() -> dict[int, str]:
    """How byte-level tokenizers write each byte: as itself if that can be seen, else from U+0100.

    GPT-2's table, which the ``tokenizers`` library has built in.
    """
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in seen)
    return {b: chr(b) for b in seen} | {b: chr(256 + n) for n, b in enumerate(others)}


def make_tokenizer(model: ModelSpec, path: Path | None = None) -> Tokenizer:
    """Return the tokenizer that the manifest names; ``path`` is its file. Raises ConfigError."""
    if model.tokenizer == "bytes":
        return ByteTokenizer(model.vocabulary)
    if path is None:
        raise ConfigError(
            "this swarm uses a tokenizer file and none was given",
            "Get the tokenizer file from the organiser and name its path.",
        )
    return FileTokenizer(path, model.tokenizer_sha256, model.vocabulary)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the tokenizer file {path} cannot be read: {error.strerror}",
            "Get the tokenizer file from the organiser and name its path.",
        ) from error
