"""The table of deadlines: outer limits exceed inner ones, all are used, and the docs print them."""

from __future__ import annotations

import ast
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from source_tree import ROOT, sources

from protocol.deadlines import NESTED, Deadlines

PAGE = ROOT / "docs" / "deadlines.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_outer_exceeds_inner(outer: str, inner: str) -> None:
    limits = Deadlines()
    assert getattr(limits, outer) > getattr(limits, inner)


@pytest.mark.parametrize(("outer", "inner"), NESTED)
def test_table_with_equal_limits_is_refused(outer: str, inner: str) -> None:
    """Whoever raises an inner limit alone is told so."""
    limits = Deadlines().model_dump()
    limits[inner] = limits[outer]
    with pytest.raises(ValidationError, match="must exceed"):
        Deadlines(**limits)


@given(factor=st.floats(min_value=1e-3, max_value=1e3))
def test_scaling_keeps_the_order(factor: float) -> None:
    limits = Deadlines().scaled(factor)
    assert all(getattr(limits, outer) > getattr(limits, inner) for outer, inner in NESTED)
    assert limits.dial_s == pytest.approx(Deadlines().dial_s * factor)


def test_nothing_exceeds_itself_through_others() -> None:
    """Each pair is between known limits, and the order has no circle."""
    inner_of: dict[str, set[str]] = defaultdict(set)
    for outer, inner in NESTED:
        inner_of[outer].add(inner)
    assert {name for pair in NESTED for name in pair} <= set(Deadlines.model_fields)
    for name in list(inner_of):
        seen, queue = set(), list(inner_of[name])
        while queue:
            seen.add(inner := queue.pop())
            queue += [n for n in inner_of[inner] if n not in seen]
        assert name not in seen


def test_every_limit_is_used() -> None:
    used = {
        node.attr
        for source in sources()
        if source.module != "protocol.deadlines"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute)
    }
    assert set(Deadlines.model_fields) - used == set()


def table() -> str:
    """The table as the docs print it."""
    rows = ["| limit | default (s) | must exceed |", "|---|---|---|"]
    for name, seconds in Deadlines():
        inner = ", ".join(f"`{i}`" for o, i in NESTED if o == name)
        rows.append(f"| `{name}` | {seconds:g} | {inner} |")
    return "\n".join(rows)


def test_docs_print_the_table() -> None:
    printed = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert printed == table(), f"put this between the marks of {PAGE.name}:\n{table()}"


@pytest.mark.parametrize("name", list(Deadlines.model_fields))
def test_docs_explain_every_limit(name: str) -> None:
    explanation = PAGE.read_text().split(END)[1]
    assert f"`{name}`" in explanation
