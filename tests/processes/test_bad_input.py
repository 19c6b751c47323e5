"""What owners get wrong: each mistake has a cause, a remedy, a code and an exit status."""

from __future__ import annotations

import ast
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from mounts import fill, make_read_only, mounted

from cli.main import run
from cli.recipe import Recipe
from node.config import load_config
from node.daemon import run_daemon
from node.identity import load_or_create_key, sole_key, sole_use
from node.metrics import error_classes
from node.paths import StatePaths
from protocol.errors import ShoalError, as_shoal_error
from protocol.invite import Invite
from protocol.keys import NodeKey
from protocol.manifest import sign

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HERE = "tests/processes/test_bad_input.py"
THERE = "tests/network/test_entrance.py"
# What the table of the page says, and the test that holds it.
ROWS = {
    "the invite is malformed, cut or expired": ("config", 2, HERE, "test_invite"),
    "the invite leads to another swarm": ("config", 2, HERE, "test_foreign_invite"),
    "the manifest was changed": ("config", 2, HERE, "test_tampered_manifest"),
    "manifest or invite are of another version": ("version_mismatch", 3, HERE, "test_version"),
    "a port is in use": ("resource", 6, HERE, "test_port"),
    "others may read the key": ("identity", 5, HERE, "test_open_key"),
    "the state directory is in use": ("identity", 5, HERE, "test_same_state"),
    "the key is in use on this computer": ("identity", 5, HERE, "test_same_key"),
    "the key is in use on another computer": (
        "identity", 5, THERE, "test_the_same_key_on_another_computer_is_refused",
    ),
    "no seed answers, with --no-retry": (
        "unreachable", 4, THERE, "test_a_silent_seed_is_named_and_tried_again",
    ),
    "the clock is off": ("clock", 9, THERE, "test_a_clock_that_is_off_is_told"),
    "the data path is missing, empty or not text": ("config", 2, HERE, "test_data"),
    "the text is too short, or its validation part": ("config", 2, HERE, "test_short_text"),
    "the stage needs more memory": ("resource", 6, HERE, "test_memory"),
    "the disk is full": ("resource", 6, HERE, "test_full_disk"),
    "the state directory is read-only": ("resource", 6, HERE, "test_read_only"),
    "the command line is mistyped": ("config", 2, HERE, "test_mistyped"),
}  # fmt: skip
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/" + NodeKey(b"s" * 32).peer_id
SMALL = Recipe(layers=2, stages=1, width=32, heads=2, context=32)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    """An organiser's state directory, ready to run."""
    monkeypatch.setenv("SHOAL_LISTEN_HOST", "127.0.0.1")
    found = StatePaths(tmp_path / "state")
    organise(found)
    return found


def organise(paths: StatePaths, recipe: Recipe = SMALL) -> None:
    key = load_or_create_key(paths)
    paths.manifest.write_text(sign(recipe.manifest((key.peer_id,)), key).to_toml())
    paths.config.write_text('role = "organiser"\n')


def daemon(paths: StatePaths) -> ShoalError:
    """Run the daemon, which must refuse; return what it tells."""
    with pytest.raises(Exception) as caught:
        run_daemon(paths, load_config(paths.config), {}, None)
    return as_shoal_error(caught.value)


def expect(row: str, error: ShoalError, cause: str) -> None:
    """The error is the table's, and says what is wrong and what to do, each on one line."""
    assert (error.code, error.exit_status) == ROWS[row][:2], error.cause
    assert re.search(cause, error.cause), error.cause
    for text in (error.cause, error.hint):
        assert len(text.strip().splitlines()) == 1


def expect_told(row: str, status: int, told: str, cause: str) -> None:
    """The same for a command's last two lines on stderr."""
    code, exit_status, *_ = ROWS[row]
    assert status == exit_status, told
    *_, first, last = told.splitlines()
    assert first.startswith(f"error[{code}]: "), told
    assert re.search(cause, first), first
    assert last.startswith("remedy: ")
    assert "Traceback" not in told


def invite(swarm: str = "a" * 64, expires_at: int | None = None) -> str:
    organiser = NodeKey(b"o" * 32).peer_id
    made = Invite(swarm_id=swarm, organiser=organiser, seeds=(ADDRESS,), expires_at=expires_at)
    return made.encode()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("nonsense", "not an invite"),
        (invite()[:-7], "the invite"),
        (invite().replace("A", "B", 1), "the invite"),
        (invite(expires_at=1), "expired"),
    ],
)
def test_invite(text: str, cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(["join", text, "--state", str(tmp_path)])
    expect_told("the invite is malformed, cut or expired", status, capfd.readouterr().err, cause)
    assert list(tmp_path.iterdir()) == []


def test_foreign_invite(paths: StatePaths, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(["join", invite(), "--state", str(paths.root)])
    told = capfd.readouterr().err
    expect_told("the invite leads to another swarm", status, told, "belongs to swarm")


def test_tampered_manifest(paths: StatePaths) -> None:
    text = paths.manifest.read_text()
    paths.manifest.write_text(text.replace("seed = 0", "seed = 7"))
    assert paths.manifest.read_text() != text
    expect("the manifest was changed", daemon(paths), "not signed by its organiser")


def test_version(paths: StatePaths, capfd: pytest.CaptureFixture[str]) -> None:
    row = "manifest or invite are of another version"
    status = run(["join", "shoal9:abcd", "--state", str(paths.root)])
    expect_told(row, status, capfd.readouterr().err, "kind shoal9")
    text = re.sub(r"protocol_version = \d+", "protocol_version = 99", paths.manifest.read_text())
    paths.manifest.write_text(text)
    expect(row, daemon(paths), "protocol 99")


@pytest.mark.parametrize("setting", ["listen_port", "dht_port", "metrics_port"])
def test_port(paths: StatePaths, setting: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        paths.config.write_text(f'role = "organiser"\n{setting} = {port}\n')
        expect("a port is in use", daemon(paths), str(port))


def test_open_key(paths: StatePaths) -> None:
    paths.key.chmod(0o640)
    error = daemon(paths)
    expect("others may read the key", error, "mode 0640")
    assert error.hint == f"chmod 600 {paths.key}"


def test_same_state(paths: StatePaths) -> None:
    with sole_use(paths):
        expect("the state directory is in use", daemon(paths), f"process {os.getpid()}")


def test_same_key(paths: StatePaths, tmp_path: Path) -> None:
    copy = StatePaths(tmp_path / "copy")
    shutil.copytree(paths.root, copy.root)
    with sole_key(load_or_create_key(paths).peer_id):
        expect("the key is in use on this computer", daemon(copy), f"process {os.getpid()}")


@pytest.mark.parametrize("kind", ["missing", "empty", "binary"])
def test_data(
    paths: StatePaths, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row, data = "the data path is missing, empty or not text", tmp_path / "data"
    if kind == "missing":
        status = run(["swarm", "run", "--data", str(data), "--state", str(paths.root)])
        expect_told(row, status, capfd.readouterr().err, "does not exist")
    elif kind == "empty":
        data.mkdir()
    else:
        data.write_bytes(os.urandom(4096) + b"\0")
    paths.config.write_text(f'role = "organiser"\ndata = ["{data}"]\n')
    told = {"missing": "does not exist", "empty": "no text in", "binary": "not UTF-8 text"}
    expect(row, daemon(paths), told[kind])


@pytest.mark.parametrize("part", ["training", "validation"])
def test_short_text(paths: StatePaths, part: str, tmp_path: Path) -> None:
    data = tmp_path / "short.txt"
    data.write_text("a few words\n" * (1 if part == "training" else 40))
    paths.config.write_text(f'role = "organiser"\ndata = ["{data}"]\n')
    error = daemon(paths)
    row = "the text is too short, or its validation part"
    expect(row, error, rf"\d+ tokens of {part} text are too few for a context of 32")


def test_memory(paths: StatePaths) -> None:
    paths.config.write_text('role = "organiser"\nmemory_bytes = "1KiB"\n')
    error = daemon(paths)
    expect("the stage needs more memory", error, r"stage 0 needs (\d+) MiB; this node may use")
    assert re.search(r"--memory \d+MiB", error.hint)


def test_full_disk(paths: StatePaths, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = "the disk is full"
    with mounted(tmp_path / "disk"):
        state = tmp_path / "disk" / "state"
        shutil.copytree(paths.root, state)
        fill(tmp_path / "disk")
        (state / "key").unlink()
        fill(state)  # the key's page, too
        command = ["swarm", "create", str(tmp_path / "m.toml"), "--state", str(state)]
        expect_told(row, run(command), capfd.readouterr().err, "No space left on device")
        expect(row, daemon(StatePaths(state)), "No space left on device")


def test_read_only(paths: StatePaths, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = "the state directory is read-only"
    with mounted(tmp_path / "disk"):
        state = tmp_path / "disk" / "state"
        shutil.copytree(paths.root, state)
        make_read_only(tmp_path / "disk")
        status = run(["swarm", "run", "--state", str(state)])
        expect_told(row, status, capfd.readouterr().err, "Read-only file system")
        expect(row, daemon(StatePaths(state)), "Read-only file system")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["fly"], "no such command 'fly'"),
        (["status", "--sideways"], "no such option: --sideways"),
        (["join", "--stage", "first"], "'--stage'"),
    ],
)
def test_mistyped(words: list[str], cause: str, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(words)
    expect_told("the command line is mistyped", status, capfd.readouterr().err, cause)


def test_a_real_daemon_says_it_too(paths: StatePaths) -> None:
    """What the process prints and returns is what the function raises."""
    paths.key.chmod(0o644)
    command = [sys.executable, "-m", "node.main", "--state", str(paths.root)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    expect_told("others may read the key", ended.returncode, ended.stderr, "mode 0644")


def make(python: str, path: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("make")
    if program is None:
        pytest.skip("there is no make")
    command = [program, "--no-print-directory", "check-system", f"PYTHON={python}"]
    environment = {"PATH": str(path)}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


@pytest.mark.parametrize("lacking", ["python", "compiler", "gmp.h"])
def test_installing_names_the_package_that_is_missing(lacking: str, tmp_path: Path) -> None:
    if lacking == "gmp.h":
        compiler = tmp_path / "gcc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
    ended = make("no-such-python" if lacking == "python" else sys.executable, tmp_path)
    assert ended.returncode == 2
    wanted = "python3.11-venv" if lacking == "python" else "gcc libgmp-dev"
    assert f"sudo apt-get install {wanted}" in ended.stdout.replace("python3.11 python", "python")
    assert "Traceback" not in ended.stderr


def test_the_page_has_this_table() -> None:
    found = re.findall(r"^\| (.+?) +\| `(\w+)` +\| (\d) +\|$", PAGE.read_text(), re.MULTILINE)
    told = {row.replace("`", ""): (code, int(status)) for row, code, status in found}
    assert told == {row: entry[:2] for row, entry in ROWS.items()}


def test_the_codes_have_these_statuses() -> None:
    known = {cls.code: cls.exit_status for cls in error_classes()}
    assert all(known[code] == status for code, status, *_ in ROWS.values())


def test_each_row_has_its_test() -> None:
    for _, _, file, name in ROWS.values():
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
