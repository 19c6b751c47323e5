"""Messages nobody would send: examples and mutations made from the models themselves.

A new message type, frame or packet is covered as soon as it exists; if ``leaves`` has nothing that
a new field accepts, ``example`` says so.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgpack
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from protocol.keys import NodeKey, PeerId

PEERS: tuple[PeerId, ...] = tuple(NodeKey(bytes([n]) * 32).peer_id for n in range(1, 13))
LEAVES: tuple[Any, ...] = (
    1, 0, -1, 2, 3, 4095, 2**31, 2**40, 2**41, 2**53 - 1, True, False, 1.0, -1.0, math.nan,
    *PEERS[:3], "ab" * 32, "0" * 64, "/ip4/127.0.0.1/tcp/1", "x", "", "\0\n\x1b[2J" * 20,
    b"s" * 64, b"i" * 16, b"k" * 68, b"",
)  # fmt: skip
Pick = Callable[[Sequence[Any]], Any]


def first(choices: Sequence[Any]) -> Any:
    """The plainest choice."""
    return choices[0]


def example(model: type[BaseModel], pick: Pick = first, leaves: Sequence[Any] = LEAVES) -> Any:
    """An instance whose every value is chosen by ``pick`` among those that the model allows."""
    return model(**{
        name: _value(field.rebuild_annotation(), pick, tuple(leaves))
        for name, field in model.model_fields.items()
    })  # fmt: skip


def absurd(model: type[BaseModel], rng: Random, leaves: Sequence[Any]) -> Any:
    """A valid instance of values that do not fit each other."""
    return example(model, rng.choice, leaves)


def _value(annotation: Any, pick: Pick, leaves: tuple[Any, ...]) -> Any:
    inner, origin = _stripped(annotation)
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return example(inner, pick, leaves)
    if origin is Literal:
        return pick(get_args(inner))
    if origin in (Union, types.UnionType):
        return _value(pick(get_args(inner)), pick, leaves)
    if origin is tuple:
        kinds = get_args(inner)
        if kinds[-1] is Ellipsis:
            least = _least_length(annotation)
            kinds = kinds[:1] * pick([n for n in (1, 0, 2, 3) if n >= least])
        return tuple(_value(kind, pick, leaves) for kind in kinds)
    return pick(_allowed(annotation, leaves))


def _stripped(annotation: Any) -> tuple[Any, Any]:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation, get_origin(annotation)


def _least_length(annotation: Any) -> int:
    """How many items a tuple must have."""
    notes: list[Any] = list(getattr(annotation, "__metadata__", ()))
    notes += [inner for note in notes for inner in getattr(note, "metadata", ())]
    return max((getattr(note, "min_length", 0) or 0 for note in notes), default=0)


@cache
def _allowed(annotation: Any, leaves: tuple[Any, ...]) -> list[Any]:
    if annotation is None or annotation is type(None):
        return [None]
    adapter = TypeAdapter(annotation)
    allowed = [leaf for leaf in leaves if _fits(adapter, leaf)]
    assert allowed, f"no leaf fits {annotation}; add one to LEAVES"
    return allowed


def _fits(adapter: TypeAdapter[Any], leaf: Any) -> bool:
    try:
        adapter.validate_python(leaf, strict=True)
    except ValidationError:
        return False
    return True


# --- mutations -----------------------------------------------------------------------------


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


hostile = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            2**53,
            2**63,
            2**64 - 1,
            -(2**63),
            math.nan,
            math.inf,
            -math.inf,
            1e308,
            "",
            "\0",
            "x" * 5000,
            "é" * 99,
            b"",
            b"\xff" * 5000,
            [],
            {},
            {"kind": "presence"},
            nested(600),
            [0] * 3000,
            {str(n): n for n in range(500)},
            {1: 2},
            msgpack.ExtType(5, b"x"),
            msgpack.Timestamp(0, 0),
        ]
    ),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(st.characters(codec="utf-8"), max_size=30)
        | st.binary(max_size=30),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside ``value``, and to itself."""
    yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list | tuple) else items
    for key, inner in items:
        yield from places(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with another value at ``path``."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], new)
    return copy


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """``value`` with one thing in it replaced, taken away, added or repeated."""
    every = list(places(value))
    return st.one_of(
        st.builds(lambda at, new: replaced(value, at, new), st.sampled_from(every), hostile),
        st.builds(
            lambda at, key, new: _with(value, at, key, new),
            st.sampled_from(every), st.text(max_size=8), hostile,
        ),
        st.builds(lambda at: _without(value, at), st.sampled_from(every[1:] or every)),
        st.builds(
            lambda at, times: _repeated(value, at, times),
            st.sampled_from(every), st.sampled_from([0, 2, 5000]),
        ),
    )  # fmt: skip


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], key: str, new: Any) -> Any:
    there = _at(value, path)
    return replaced(value, path, {**there, key: new} if isinstance(there, dict) else [there, new])


def _without(value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return None
    there = _at(value, path[:-1])
    if isinstance(there, dict):
        rest: Any = {key: inner for key, inner in there.items() if key != path[-1]}
    else:
        rest = [inner for index, inner in enumerate(there) if index != path[-1]]
    return replaced(value, path[:-1], rest)


def _repeated(value: Any, path: tuple[Any, ...], times: int) -> Any:
    there = _at(value, path)
    return replaced(value, path, list(there) * times if isinstance(there, list | tuple) else there)
