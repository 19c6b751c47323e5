"""The data node's text: reading, holding out, packing, drawing, entropies."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from itertools import pairwise

import pytest
import torch
from stages_kit import make_manifest
from tokenizers import Tokenizer, models, pre_tokenizers

from protocol.errors import ConfigError
from stages import Corpus, load_corpus, make_tokenizer
from stages.data import split_documents
from stages.sources import read_documents, standard_library_documents

NO_VALIDATION = {"validation_fraction": 0.0, "eval_every": 0}


def tiny(documents, *, vocabulary=257, context=4, data=NO_VALIDATION):
    manifest = make_manifest(model={"vocabulary": vocabulary, "context": context}, data=data)
    return Corpus(documents, make_tokenizer(manifest.model), manifest)


def texts(count):
    return [f"document {k} ".encode() * (3 + k % 5) for k in range(count)]


# --- packing and drawing -------------------------------------------------------------------


@pytest.mark.parametrize(("vocabulary", "separator"), [(257, 256), (256, 0)])
def test_documents_are_packed_with_separators(vocabulary, separator):
    corpus = tiny([b"abc", b"de"], vocabulary=vocabulary, context=6)
    assert corpus.num_train_tokens == 7
    row = corpus.draw(0, 0)[0].tolist()  # the only window is everything
    assert row == [*b"abc", separator, *b"de", separator]


def test_draws_depend_on_seed_step_and_slot_alone():
    documents = texts(40)
    corpus, again = tiny(documents), tiny(documents)
    first = corpus.draw(3, 5)
    corpus.draw(1, 1)
    assert first.dtype == torch.int64
    assert first.shape == (3, 5)
    assert torch.equal(corpus.draw(3, 5), first)
    assert torch.equal(again.draw(3, 5), first)
    other = tiny(documents, data={**NO_VALIDATION, "seed": 8})
    for different in (corpus.draw(3, 6), corpus.draw(5, 3), other.draw(3, 5)):
        assert not torch.equal(different, first)


def test_draws_follow_the_documented_recipe():
    documents = texts(40)
    packed = [t for document in documents for t in (*document, 256)]
    window = tiny(documents).draw(3, 5)
    for row in range(3):
        number = int.from_bytes(sha256(f"7/3/5/{row}".encode()).digest()[:8], "big")
        start = number % (len(packed) - 4)
        assert window[row].tolist() == packed[start : start + 5]


def test_validation_goes_through_the_held_out_text_and_starts_again():
    corpus = tiny(texts(40), data={"validation_fraction": 0.3})
    num_windows = (corpus.num_validation_tokens - 1) // 4
    rows = torch.cat([corpus.validation(k) for k in range(num_windows)]).tolist()
    assert rows[:num_windows] == rows[num_windows : 2 * num_windows]
    assert all(a[-1] == b[0] for a, b in pairwise(rows[:num_windows]))


# --- holding out ---------------------------------------------------------------------------


def test_a_document_is_held_out_whatever_else_there_is():
    documents = texts(200)
    train, held_out = split_documents(documents, 7, 0.25)
    assert sorted(train + held_out) == sorted(documents)
    assert 25 < len(held_out) < 75
    _, held_out_of_half = split_documents(documents[::2], 7, 0.25)
    assert set(held_out_of_half) == set(held_out) & set(documents[::2])
    assert split_documents(documents, 8, 0.25)[1] != held_out


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_neither_side_is_ever_empty(fraction):
    train, held_out = split_documents(texts(40), 7, fraction)
    assert train
    assert held_out


def test_one_long_document_serves_as_many():
    document = b"".join(b"line %d\n" % k for k in range(1000))
    train, held_out = split_documents([document], 7, 0.1)
    assert 1 <= len(held_out) < 40
    assert sum(map(len, train + held_out)) == len(document)
    assert all(piece.endswith(b"\n") for piece in train + held_out)


# --- entropies -----------------------------------------------------------------------------


def test_entropies_of_a_known_text():
    corpus = tiny([b"abab" * 2])  # a and b four times, one separator
    frequencies = [4 / 9, 4 / 9, 1 / 9]
    unigram = -sum(p * math.log(p) for p in frequencies)
    assert corpus.unigram_entropy() == pytest.approx(unigram)
    # a is always followed by b; b by a three times in four: H = 4/8 * H(3/4)
    bigram = 0.5 * -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert corpus.bigram_entropy() == pytest.approx(bigram)


def test_entropies_agree_between_small_and_large_vocabularies():
    small, large = tiny(texts(30)), tiny(texts(30), vocabulary=70_000)
    assert large.bigram_entropy() == pytest.approx(small.bigram_entropy())
    assert small.bigram_entropy() < small.unigram_entropy() < math.log(257)


# --- reading -------------------------------------------------------------------------------


def test_json_lines_are_documents(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "other": 1}) for text in ("one", "zwei \u00fc")]
    path.write_text("\n\n".join(lines) + "\n")
    assert read_documents([path]) == [b"one", "zwei \u00fc".encode()]


def test_folders_are_read_in_order_without_what_is_not_text(tmp_path):
    for name, content in {
        "b/two.txt": b"two", "a.md": b"one", "image.png": b"\x89PNG\0", "latin": b"\xff\xfe",
        ".hidden": b"secret", ".git/config": b"secret", "z.jsonl": b'{"text": "three"}',
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_documents([tmp_path]) == [b"one", b"two", b"three"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("binary.txt", b"a\0b"),
        ("latin.txt", b"\xe4\xf6"),
        ("empty.txt", b""),
        ("a.jsonl", b'{"txt": "a"}'),
        ("b.jsonl", b"not json"),
        ("c.jsonl", b'{"text": "a\\u0000b"}'),
        ("d.jsonl", b'["text"]'),
    ],
)
def test_what_is_not_text_is_refused_with_a_remedy(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_documents([tmp_path / name])
    assert name in caught.value.cause
    assert "UTF-8" in caught.value.hint


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError):
            read_documents([path])


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_bytes(b"short")
    with pytest.raises(ConfigError, match="too few"):
        load_corpus(make_manifest(), [tmp_path])


def test_the_default_corpus_is_the_standard_library():
    documents = standard_library_documents(500_000)
    assert 150_000 < sum(map(len, documents)) <= 500_000
    assert documents == standard_library_documents(500_000)
    assert any(b"import " in document for document in documents)


# --- tokenizers ----------------------------------------------------------------------------


def test_bytes_round_trip():
    tokenizer = make_tokenizer(make_manifest().model)
    assert tokenizer.decode(tokenizer.encode("caf\u00e9 \U0001f41f")) == "caf\u00e9 \U0001f41f"
    assert tokenizer.decode([104, 105, 256, 255]) == "hi\n\ufffd"


@pytest.fixture
def tokenizer_file(tmp_path):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "red": 1, "fish": 2, "</s>": 3}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    words.save(str(path))
    return path


def file_manifest(path, vocabulary=10):
    digest = sha256(path.read_bytes()).hexdigest()
    model = {"tokenizer": "file", "tokenizer_sha256": digest, "vocabulary": vocabulary}
    return make_manifest(model={**model, "context": 4}, data=NO_VALIDATION)


def test_a_tokenizer_file_is_used(tokenizer_file):
    manifest = file_manifest(tokenizer_file)
    tokenizer = make_tokenizer(manifest.model, tokenizer_file)
    corpus = Corpus([b"red fish blue", b"fish"], tokenizer, manifest)
    assert corpus.num_train_tokens == 6
    assert tokenizer.encode("fish red") == [2, 1]
    assert tokenizer.decode([2, 1]) == "fish red"
    assert tokenizer.separator == 3


def test_a_wrong_tokenizer_file_is_refused(tokenizer_file):
    manifest = file_manifest(tokenizer_file)
    with pytest.raises(ConfigError, match="none was given"):
        make_tokenizer(manifest.model)
    with pytest.raises(ConfigError, match="vocabulary"):
        make_tokenizer(file_manifest(tokenizer_file, vocabulary=3).model, tokenizer_file)
    tokenizer_file.write_text(tokenizer_file.read_text() + " ")
    with pytest.raises(ConfigError, match="SHA-256"):
        make_tokenizer(manifest.model, tokenizer_file)
    with pytest.raises(ConfigError, match="cannot be read"):
        make_tokenizer(manifest.model, tokenizer_file.with_name("missing"))
