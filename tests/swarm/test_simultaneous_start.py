"""Nodes that start at the same moment, or all again on other ports, become one swarm."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simultaneous_start.py"


def rounds(*words: str) -> dict[str, dict[str, float]]:
    """Play rounds of eight side-cars and return what the script tells of each kind of start."""
    command = [sys.executable, str(SCRIPT), "--json", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_at_once_make_one_swarm() -> None:
    told = rounds("--rounds", "1")
    assert told["together"]["one_swarm"] == 1


@pytest.mark.slow
def test_all_start_again_on_other_ports() -> None:
    """At once, and one after the other: found again within two lifetimes of a record."""
    told = rounds("--rounds", "2", "--phases", "all")
    assert [kind["one_swarm"] for kind in told.values()] == [2, 2, 2]
