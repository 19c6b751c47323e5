"""What running a node in the foreground does to the state directory."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from cli.foreground import _forget_old_invite
from node.client import ControlClient
from node.paths import StatePaths
from protocol.errors import Unreachable


class FakeClient:
    def __init__(self, *, is_running: bool) -> None:
        self.is_running = is_running

    def status(self) -> None:
        if not self.is_running:
            raise Unreachable("no daemon runs")


@pytest.mark.parametrize("is_running", [True, False])
def test_an_old_invite_goes_unless_its_daemon_still_runs(tmp_path: Path, is_running: bool) -> None:
    paths = StatePaths(tmp_path)
    paths.invite.write_text("shoal1:x")
    _forget_old_invite(paths, cast(ControlClient, FakeClient(is_running=is_running)))
    assert paths.invite.exists() == is_running
