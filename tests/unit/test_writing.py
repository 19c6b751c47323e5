"""How tokens are chosen and become text in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.status import GenerateEvent, GenerateRequest
from node.writing import TextSoFar, chooser, write
from stages.tokenizer import ByteTokenizer

BYTES = ByteTokenizer(257)


@given(st.lists(st.integers(0, 256), max_size=40) | st.text().map(BYTES.encode))
def test_the_pieces_make_up_the_text(tokens: list[int]) -> None:
    text = TextSoFar(BYTES)
    pieces = [text.add(token) for token in tokens] + [text.rest()]
    assert "".join(pieces) == BYTES.decode(tokens)


def test_half_a_character_waits_for_the_rest() -> None:
    text = TextSoFar(BYTES)
    assert [text.add(token) for token in "a😀é".encode()] == ["a", "", "", "", "😀", "", "é"]


def test_the_likeliest_is_chosen_without_temperature() -> None:
    assert chooser(0.0, 5)(torch.tensor([0.1, 3.0, 2.9])) == 1


def test_the_seed_repeats_the_draws() -> None:
    logits = torch.zeros(1000)
    draws = [[choose(logits) for _ in range(20)] for choose in (chooser(1, 7), chooser(1, 7))]
    assert draws[0] == draws[1] != [chooser(1, 8)(logits) for _ in range(20)]


def test_a_low_temperature_is_all_but_greedy() -> None:
    choose = chooser(0.01, 0)
    assert {choose(torch.tensor([0.0, 1.0, 0.5])) for _ in range(50)} == {1}


class Model:
    """Writes a script, token by token."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script, self.step, self.seen = list(script), 4, []
        self.sessions = SimpleNamespace(generation=self.generation)

    @asynccontextmanager
    async def generation(self, num_tokens: int):
        self.num_tokens = num_tokens
        yield self

    async def next_logits(self, tokens: list[int]) -> torch.Tensor:
        self.seen.append(list(tokens))
        return torch.nn.functional.one_hot(torch.tensor(self.script.pop(0)), 257).float()


@pytest.mark.parametrize(
    ("script", "text", "end"),
    [
        (list(b"banana"), "ban", "length"),
        ([*b"hi", 256, 33], "hi", "separator"),
        ([*b"h\xc3", 256], "h\ufffd", "separator"),
        (list("h😀".encode()), "h\ufffd", "length"),
    ],
)
async def test_text_is_told_as_it_comes(script: list[int], text: str, end: str) -> None:
    events: list[GenerateEvent] = []

    async def tell(event: GenerateEvent) -> None:
        events.append(event)

    model = Model(script)
    await write(model, BYTES, GenerateRequest(prompt="ab", num_tokens=3), tell)
    assert events[0] == GenerateEvent(step=4, num_tokens=2)
    assert "".join(event.text for event in events) == text
    assert [event.end for event in events if event.end] == [end]
    assert events[-1].end == end
    assert model.num_tokens == 5
    assert model.seen[0] == list(b"ab")


async def test_an_empty_prompt_begins_a_document() -> None:
    async def tell(event: GenerateEvent) -> None:
        pass

    model = Model([65])
    await write(model, BYTES, GenerateRequest(prompt="", num_tokens=1), tell)
    assert model.seen == [[256]]
