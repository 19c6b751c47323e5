"""What a node's work amounts to survives its restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.totals import Totals, Work, read_work


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "totals.json"


def test_work_adds_up_over_lives(file: Path) -> None:
    first = Totals(file)
    for step, count in ((4, 1), (4, 2), (5, 1)):
        first.note(step, count)
    assert read_work(file) == Work()
    first.save()
    again = Totals(file)
    assert again.work == Work(microbatches=4, steps=2)
    again.note(9, 1)
    again.save()
    assert read_work(file) == Work(microbatches=5, steps=3)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"microbatches": -1}', '{"microbatches": "x"}', "\udcff"]
)
def test_a_damaged_file_counts_from_nothing(file: Path, text: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert Totals(file).work == Work()


def test_a_disk_that_refuses_costs_no_work(tmp_path: Path) -> None:
    totals = Totals(tmp_path / "gone" / "totals.json")
    totals.note(0, 1)
    totals.save()
    (tmp_path / "gone").mkdir()
    totals.save()
    assert read_work(tmp_path / "gone" / "totals.json").microbatches == 1
