"""SHOAL_FAULT: tests may name a point at which a daemon dies; anything else is refused."""

from __future__ import annotations

import os
import signal

import pytest

from node.faults import POINTS, KillAt, NoFaults, faults_from
from protocol.errors import ConfigError
from protocol.simulation import faults as simulated


async def test_without_the_variable_nothing_ever_happens() -> None:
    faults = faults_from({})
    assert isinstance(faults, NoFaults)
    for point in POINTS:
        await faults.reach(point, 0)


async def test_the_node_dies_at_its_point_of_its_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    faults = faults_from({"SHOAL_FAULT": "after_commit@3"})
    assert faults == KillAt("after_commit", 3)
    await faults.reach("after_commit", 2)
    await faults.reach("before_step", 3)
    assert killed == []
    await faults.reach("after_commit", 3)
    assert killed == [(os.getpid(), signal.SIGKILL)]


async def test_any_step_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    faults = faults_from({"SHOAL_FAULT": "in_state_transfer@any"})
    await faults.reach("after_commit", 7)
    assert killed == []
    await faults.reach("in_state_transfer", 7)
    assert killed == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize(
    "text", ["", "after_commit", "after_commit@", "after_commit@x", "after_commit@²", "nowhere@1"]
)
def test_what_names_no_point_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="POINT@STEP"):
        faults_from({"SHOAL_FAULT": text})


def test_the_simulator_knows_the_same_points() -> None:
    assert {*simulated.POINTS, *simulated.PATH_POINTS} == POINTS
