"""Each check of the doctor, where all is well and where it is not."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_assembly import manifest_of

from cli.main import run
from node import doctor
from node.config import NodeConfig
from node.doctor import machine, own, software
from node.doctor.finding import Finding, ok, warning, wrong
from node.identity import load_or_create_key, sole_key
from node.paths import StatePaths
from node.sidecar import sweep
from protocol.manifest import sign
from protocol.simulation.host import simulation_key

GIB = 2**30


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path)


def told(finding: Finding) -> tuple[str, str, bool]:
    return finding.check, finding.mark, bool(finding.remedy)


def test_what_is_installed_here_is_well() -> None:
    for finding in (
        software.check_python(),
        software.check_libraries(),
        software.check_gmp(),
        software.check_device("cpu"),
    ):
        assert finding.mark == "ok", finding


@pytest.mark.parametrize(("version", "platform"), [((3, 10, 9), "linux"), ((3, 11, 0), "win32")])
def test_another_python_or_system_is_wrong(version: tuple[int, ...], platform: str) -> None:
    assert told(software.check_python(version, platform)) == ("python", "error", True)


def test_a_missing_library_is_named() -> None:
    finding = software.check_libraries(["trio>=0.30", "no-such-lib>=1", 'x; extra == "dev"'])
    assert (finding.mark, finding.cause) == ("error", "missing: no-such-lib")


def test_a_missing_gmp_is_wrong() -> None:
    finding = software.check_gmp("no-such-gmp")
    assert told(finding) == ("libgmp", "error", True)
    assert "libgmp10" in finding.remedy


def test_a_missing_compiler_or_header_is_a_warning(tmp_path: Path) -> None:
    assert told(software.check_compiler("no-such-compiler")) == ("compiler", "warning", True)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert "does not find gmp.h" in software.check_compiler(str(broken)).cause


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_a_device_that_cannot_compute_is_wrong(device: str) -> None:
    finding = software.check_device(device)
    assert told(finding) == ("device", "error", True)
    assert "--device cpu" in finding.remedy


def test_settings(paths: StatePaths) -> None:
    assert own.check_settings(paths)[0].mark == "ok"
    paths.config.write_text("threads = 0\n")
    finding, config = own.check_settings(paths)
    assert told(finding) == ("settings", "error", True)
    assert config == NodeConfig()
    paths.config.write_text('invite = "shoal1:nonsense"\n')
    assert own.check_settings(paths)[0].mark == "error"


def test_manifest(paths: StatePaths) -> None:
    assert own.check_manifest(paths)[0].mark == "ok"
    manifest = manifest_of()
    paths.manifest.write_text(sign(manifest, simulation_key(0)).to_toml())
    finding, known = own.check_manifest(paths)
    assert (finding.mark, known) == ("ok", manifest)
    paths.manifest.write_text(paths.manifest.read_text().replace('"assembly"', '"other"'))
    assert told(own.check_manifest(paths)[0]) == ("manifest", "error", True)


def test_key(paths: StatePaths) -> None:
    assert own.check_key(paths, is_running=False).mark == "ok"
    assert not paths.key.exists()
    key = load_or_create_key(paths)
    assert own.check_key(paths, is_running=False).mark == "ok"
    with sole_key(key.peer_id):
        finding = own.check_key(paths, is_running=False)
        assert told(finding) == ("key", "error", True)
        assert own.check_key(paths, is_running=True).mark == "ok"
    paths.key.chmod(0o644)
    assert told(own.check_key(paths, is_running=False)) == ("key", "error", True)


def test_memory() -> None:
    manifest = manifest_of()
    assert machine.check_memory(NodeConfig(), manifest, 64 * GIB).mark == "ok"
    finding = machine.check_memory(NodeConfig(), manifest, GIB // 64)
    assert told(finding) == ("memory", "error", True)
    assert re.search(r"needs \d+ MiB", finding.cause)
    assert machine.check_memory(NodeConfig(), None, GIB // 4).mark == "warning"
    assert machine.check_memory(NodeConfig(memory_bytes=2 * GIB), None, GIB).mark == "warning"
    assert machine.check_memory(NodeConfig(device="toaster"), manifest, 64 * GIB).mark == "ok"


def test_disk(tmp_path: Path) -> None:
    deep = tmp_path / "not" / "made"
    assert machine.check_disk(deep, 9 * GIB).mark == "ok"
    assert machine.check_disk(deep, GIB // 2).mark == "warning"
    assert told(machine.check_disk(deep, GIB // 100)) == ("disk", "error", True)
    assert not deep.exists()
    assert machine.check_disk(Path("/proc/shoal")).mark == "error"


def test_ports() -> None:
    assert machine.check_ports(NodeConfig(), is_running=False).mark == "ok"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = NodeConfig(listen_host="127.0.0.1", dht_port=port)
        finding = machine.check_ports(config, is_running=False)
        assert told(finding) == ("ports", "error", True)
        assert str(port) in finding.cause
        assert machine.check_ports(config, is_running=True).mark == "ok"
    assert machine.check_ports(config, is_running=False).mark == "ok"


def test_clock(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch()
    now = file.stat().st_mtime
    assert machine.check_clock([file], now, is_synchronised=True).mark == "ok"
    assert machine.check_clock([file], now, is_synchronised=False).mark == "warning"
    assert told(machine.check_clock([file], now - 3600, True)) == ("clock", "error", True)
    assert machine.check_clock([tmp_path / "none"]).mark in ("ok", "warning")


def test_leftovers_are_named_and_stay(paths: StatePaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "leftovers", lambda: [])
    monkeypatch.setattr(own, "_orphans", lambda: iter(()))
    assert own.check_leftovers(paths, is_running=False).mark == "ok"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(paths.socket))
    paths.invite.touch()
    finding = own.check_leftovers(paths, is_running=False)
    assert told(finding) == ("leftovers", "warning", True)
    assert "dead socket" in finding.cause
    assert "old invite" in finding.cause
    assert own.check_leftovers(paths, is_running=True).mark == "ok"
    assert paths.socket.exists()
    monkeypatch.setattr(own, "leftovers", lambda: [Path("/tmp/shoal-sidecar-1-x")])
    monkeypatch.setattr(own, "_orphans", lambda: iter(["process 7 (p2pd)"]))
    finding = own.check_leftovers(paths, is_running=True)
    assert finding.cause == "/tmp/shoal-sidecar-1-x; process 7 (p2pd)"


def test_looking_for_leftovers_removes_nothing(tmp_path: Path) -> None:
    left = tmp_path / "shoal-sidecar-999999-abc"
    left.mkdir()
    assert sweep.leftovers(tmp_path, tmp_path / "none") == [left]
    assert left.exists()


def test_only_orphans_of_ours_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int, parent: int, name: str, *words: str) -> None:
            self.pid, self.parent, self.called, self.words = pid, parent, name, words

        def cmdline(self) -> list[str]:
            return [self.called, *self.words]

        def name(self) -> str:
            return self.called

        def ppid(self) -> int:
            return self.parent

        def uids(self) -> object:
            return SimpleNamespace(real=os.getuid())

    there = [
        Process(10, 1, "python", "-m", "node.sidecar.child"),
        Process(11, 1, "p2pd"),
        Process(12, 5, "p2pd"),
        Process(13, 1, "sleep"),
    ]
    monkeypatch.setattr(own.psutil, "process_iter", lambda: iter(there))
    assert list(own._orphans()) == ["process 10 (python)", "process 11 (p2pd)"]


async def test_a_side_car_that_does_not_start_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    finding = await own.check_sidecar()
    assert told(finding) == ("side-car", "error", True)
    assert "ended with status 1" in finding.cause


async def test_a_side_car_that_is_silent_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mute = tmp_path / "mute"
    mute.write_text("#!/bin/sh\nexec sleep 60\n")
    mute.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(mute))
    assert "no answer within 0.3 s" in (await own.check_sidecar(0.3)).cause


def findings(*found: Finding) -> Iterator[Finding]:
    return iter(found)


def test_the_command_prints_marks_and_remedies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = (
        ok("python", "3.11"),
        warning("clock", "no NTP", "set it"),
        wrong("disk", "full", "free"),
    )
    monkeypatch.setattr(doctor, "examine", lambda _: findings(*bad))
    assert run(["doctor", "--state", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok       python     3.11"
    assert lines[3:] == ["error    disk       full", " " * 20 + "remedy: free"]
    monkeypatch.setattr(doctor, "examine", lambda _: findings(*bad[:2]))
    assert run(["doctor", "--state", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[1] == {
        "check": "clock", "mark": "warning", "cause": "no NTP", "remedy": "set it",
    }  # fmt: skip
