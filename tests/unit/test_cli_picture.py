"""The loss curve as text and as a file, and how numbers are written for people."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from cli.output import duration, facts, printable, size, table
from cli.picture import chart, draw_loss, resample


def test_chart_falls_from_left_to_right() -> None:
    assert chart([4.0, 3.0, 2.0], height=2) == ["  4.00 █▁", "  2.00 ██▁"]


def test_chart_of_equal_values_is_flat() -> None:
    assert chart([2.0, 2.0], height=1) == ["  2.00 ▁▁"]


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_chart_without_numbers_is_empty(values: list[float]) -> None:
    assert chart(values) == []


def test_resampling_keeps_the_mean() -> None:
    values = [float(k) for k in range(100)]
    means = resample(values, 10)
    assert len(means) == 10
    assert sum(means) / 10 == pytest.approx(sum(values) / 100)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn picture; matplotlib keeps its fonts open, which is no leak of the test's."""
    file = tmp_path_factory.mktemp("picture") / "loss.png"
    draw_loss(file, [(1, 3.0), (2, 2.0)], [(2, 2.1)], {"unigram": 3.1, "bigram": 2.2})
    return file


def test_picture_is_a_png(picture: Path) -> None:
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_words_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert duration(3725.4) == "1:02:05"
    assert facts({"a": 1, "long": 2}) == "a     1\nlong  2"
    assert table(("x", "yy"), [(1, 2)]) == "x  yy\n1  2"
    assert printable("a\x1b[2Jé\n\tb\0") == "a\ufffd[2Jé\n\tb\ufffd"


def test_a_long_cell_loses_its_middle() -> None:
    lines = table(("name", "value", "from"), [("invite", "a" * 500 + "z", "f" * 40)]).splitlines()
    assert [len(line) <= 100 for line in lines] == [True, True]
    name, value, origin = lines[1].split()
    assert (name, len(lines[1])) == ("invite", 100)
    assert value.startswith("aaaa")
    assert "…" in value
    assert value.endswith("az")
    assert origin == "f" * 40
