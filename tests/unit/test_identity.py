"""The key file and the lock of the state directory."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.identity import load_key, load_or_create_key, sole_key, sole_use
from node.paths import StatePaths, state_paths
from protocol.errors import IdentityError, ResourceError
from protocol.keys import NodeKey


def test_the_key_is_made_once_and_kept(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "deep" / "state")
    made = load_or_create_key(paths)
    assert load_or_create_key(paths).seed == made.seed
    assert paths.key.read_bytes() == made.to_bytes()
    assert len(paths.key.read_bytes()) == 68
    assert [entry.name for entry in paths.root.iterdir()] == ["key"]


def test_only_the_owner_may_read_key_and_directory(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state")
    load_or_create_key(paths)
    assert stat.S_IMODE(paths.key.stat().st_mode) == 0o600
    assert stat.S_IMODE(paths.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    paths = StatePaths(tmp_path)
    load_or_create_key(paths)
    paths.key.chmod(mode)
    with pytest.raises(IdentityError, match=f"{mode:04o}") as caught:
        load_or_create_key(paths)
    assert caught.value.hint == f"chmod 600 {paths.key}"


@pytest.mark.parametrize("cut", [0, 67])
def test_a_damaged_key_is_refused_and_kept(tmp_path: Path, cut: int) -> None:
    paths = StatePaths(tmp_path)
    load_or_create_key(paths)
    damaged = paths.key.read_bytes()[:cut]
    paths.key.write_bytes(damaged)
    with pytest.raises(IdentityError, match="damaged"):
        load_or_create_key(paths)
    assert paths.key.read_bytes() == damaged


def test_halves_of_two_keys_are_refused(tmp_path: Path) -> None:
    one, other = NodeKey(bytes(32)).to_bytes(), NodeKey(bytes([1]) * 32).to_bytes()
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_bytes(one[:36] + other[36:])
    with pytest.raises(IdentityError, match="does not match"):
        load_key(file)


def test_a_missing_key_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no key") as caught:
        load_key(tmp_path / "key")
    assert "shoal join" in caught.value.hint


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="state directory"):
        load_or_create_key(StatePaths(tmp_path / "file" / "state"))


def test_one_state_directory_runs_once(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    with sole_use(paths):
        with pytest.raises(IdentityError, match="another shoal daemon"), sole_use(paths):
            pass
        # the refused one must not have taken the lock from the first
        with pytest.raises(IdentityError), sole_use(paths):
            pass
    with sole_use(paths):
        pass


def test_another_process_is_refused_and_told_who_runs(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from node.identity import sole_use\n"
        "from node.paths import StatePaths\n"
        "with sole_use(StatePaths(Path(sys.argv[1]))):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(IdentityError, match=f"process {holder.pid}"):
            sole_use(StatePaths(tmp_path)).__enter__()
        holder.kill()
        holder.wait()
        with sole_use(StatePaths(tmp_path)):  # a killed daemon leaves no lock behind
            pass


def test_the_state_directory_comes_from_flag_then_environment(tmp_path: Path) -> None:
    environ = {"SHOAL_STATE": str(tmp_path / "env")}
    assert state_paths(tmp_path / "flag", environ).root == tmp_path / "flag"
    assert state_paths(None, environ).root == tmp_path / "env"
    assert state_paths(None, {}).root.name == "shoal"
    assert state_paths(Path("~/x"), {}).root == Path.home() / "x"


def test_one_key_runs_once_on_a_computer(tmp_path: Path) -> None:
    peer = NodeKey(secrets.token_bytes(32)).peer_id
    code = (
        "import sys; from node.identity import sole_key\n"
        "with sole_key(sys.argv[1]):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, peer, "--state", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(IdentityError, match=f"process {holder.pid}, {tmp_path}"):
            sole_key(peer).__enter__()
        holder.kill()
        holder.wait()
        with sole_key(peer):  # a killed node leaves no lock behind
            pass


def test_a_strangers_lock_turns_nobody_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who binds the name of a key that is not theirs must not keep its owner from starting."""
    peer = NodeKey(secrets.token_bytes(32)).peer_id
    with sole_key(peer):
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with sole_key(peer):
            pass
