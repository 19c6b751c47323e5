"""An error reaches a person as two lines and a status; --debug adds the traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli import inspection
from cli.main import run
from protocol.errors import ConfigError, IdentityError, ShoalError, Unreachable

HEAVY = ("torch", "libp2p", "hivemind", "matplotlib", "trio", "stages", "numpy")


@pytest.mark.parametrize(
    ("error", "told", "status"),
    [
        (ConfigError("x is wrong", "mend x"), "error[config]: x is wrong\nremedy: mend x\n", 2),
        (Unreachable("no seed", "wait"), "error[unreachable]: no seed\nremedy: wait\n", 4),
        (IdentityError("bad key", "chmod"), "error[identity]: bad key\nremedy: chmod\n", 5),
        (
            PermissionError(13, "Permission denied", "/x"),
            "error[resource]: Permission denied: /x\n"
            "remedy: Make it accessible to this user, or name another directory with --state.\n",
            6,
        ),
        (
            ZeroDivisionError("by zero"),
            f"error[internal]: ZeroDivisionError: by zero\nremedy: {ShoalError.default_hint}\n",
            1,
        ),
    ],
)
def test_errors_are_told_as_cause_and_remedy(
    error: Exception,
    told: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(inspection, "state_paths", fail)
    assert run(["status"]) == status
    assert capsys.readouterr().err == told
    assert run(["status"], is_debug=True) == status
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith(told)


def shoal(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the real command with stdin closed and no terminal."""
    return subprocess.run(
        [sys.executable, "-c", "from cli.main import main; main()", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("command", ["status", "peers", "leave"])
def test_without_a_daemon_commands_say_so(command: str, tmp_path: Path) -> None:
    answer = shoal(command, "--state", str(tmp_path))
    assert answer.returncode == Unreachable.exit_status
    assert answer.stdout == ""
    assert answer.stderr.startswith(f"error[unreachable]: no daemon runs with {tmp_path}\nremedy: ")
    assert "Traceback" not in answer.stderr


def test_debug_may_stand_at_the_end(tmp_path: Path) -> None:
    answer = shoal("status", "--state", str(tmp_path), "--debug")
    assert answer.returncode == Unreachable.exit_status
    assert "Traceback" in answer.stderr


def test_the_command_line_starts_without_heavy_libraries() -> None:
    code = f"import sys, cli.main; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "[]"
