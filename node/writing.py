"""Text from the swarm's model for a data node's owner: tokens are chosen, and become text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from node.status import GenerateEvent, GenerateRequest
from protocol.core import NodeCore
from stages.tokenizer import Tokenizer

Tell = Callable[[GenerateEvent], Awaitable[None]]
_HALF_A_CHARACTER = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes of UTF-8


async def write(core: NodeCore, tokenizer: Tokenizer, asked: GenerateRequest, tell: Tell) -> None:
    """Continue the prompt, token by token, until the separator or the number that was asked for.

    Raises Unreachable if the swarm cannot.
    """
    tokens = list(tokenizer.encode(asked.prompt)) or [tokenizer.separator]
    text = TextSoFar(tokenizer)
    choose = chooser(asked.temperature, asked.seed)
    async with core.sessions.generation(len(tokens) + asked.num_tokens) as generation:
        await tell(GenerateEvent(step=generation.step, num_tokens=len(tokens)))
        for count in range(1, asked.num_tokens + 1):
            token = choose(await generation.next_logits(tokens))
            if token == tokenizer.separator:
                await tell(GenerateEvent(text=text.rest(), num_tokens=count, end="separator"))
                return
            tokens.append(token)
            is_last = count == asked.num_tokens
            new = text.add(token) + (text.rest() if is_last else "")
            end = "length" if is_last else None
            await tell(GenerateEvent(text=new, num_tokens=count, end=end))


def chooser(temperature: float, seed: int) -> Callable[[torch.Tensor], int]:
    """Return what picks a token by its logits [V]: the likeliest, or by chance if it is warm."""
    chance = torch.Generator().manual_seed(seed)

    def choose(logits_V: torch.Tensor) -> int:
        if not temperature:
            return int(logits_V.argmax())
        chances_V = torch.softmax(logits_V.float() / temperature, dim=-1)
        return int(torch.multinomial(chances_V, 1, generator=chance))

    return choose


class TextSoFar:
    """Tokens become text in pieces whose concatenation is the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._told = ""

    def add(self, token: int) -> str:
        """Return what can be said now; half a character waits for its other half."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        for _ in range(_LONGEST_CHARACTER - 1):
            text = text.removesuffix(_HALF_A_CHARACTER)
        return self._tell(text)

    def rest(self) -> str:
        """Return what has waited, for nothing follows."""
        return self._tell(self._tokenizer.decode(self._tokens))

    def _tell(self, text: str) -> str:
        if not text.startswith(self._told):
            return ""  # more tokens make it clear how it goes on
        new, self._told = text[len(self._told) :], text
        return new
