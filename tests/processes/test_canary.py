"""No secret leaves the key file: all that a node with a known key shows is searched for it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import base58
import psutil
import pytest
import typer.main
from pydantic import ValidationError

from cli.main import app, run
from cli.recipe import Recipe
from node.paths import StatePaths
from node.sidecar.channel import Start
from protocol.keys import NodeKey
from protocol.manifest import sign

ROOT = Path(__file__).resolve().parents[2]
KEY = NodeKey(sha256(b"canary").digest())
SECRETS = (KEY.seed, KEY.derive("sidecar").seed)
SHOAL = (sys.executable, "-c", "from cli.main import main; main()")


def disguises(secret: bytes) -> Iterator[bytes]:
    """The secret as it may stand in a text or a file."""
    yield secret
    yield repr(secret)[2:-1].encode()
    yield str(list(secret))[1:-1].encode()
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    yield base58.b58encode(secret)
    yield base64.b32encode(secret).rstrip(b"=")
    for ahead in range(3):  # inside longer data, base64 depends on how many bytes stand before
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(ahead) + secret)[4 if ahead else 0 : -4]


def windows(text: bytes) -> Iterator[bytes]:
    """Its parts: an error may quote the beginning or the end alone."""
    length = 8 if len(text) == 32 else 20
    return (text[i : i + length] for i in range(len(text) - length + 1))


def leaks(seen: Mapping[str, bytes]) -> list[str]:
    """Name the places where a part of a secret stands."""
    wanted = {w for secret in SECRETS for text in disguises(secret) for w in windows(text)}
    return [place for place, data in seen.items() if any(text in data for text in wanted)]


@pytest.mark.parametrize("number", range(13))
def test_every_disguise_is_seen_through(number: int) -> None:
    text = list(disguises(KEY.seed))[number]
    assert leaks({"log": b"x" + text + b"y", "other": b"all quiet"}) == ["log"]
    assert len(list(disguises(KEY.seed))) == 13
    in_a_file = base64.b64encode(KEY.to_bytes())
    assert leaks({"file": in_a_file}) == ["file"]


def organise(state: Path) -> StatePaths:
    paths = StatePaths(state)
    paths.create()
    paths.key.touch(0o600)
    paths.key.write_bytes(KEY.to_bytes())
    recipe = Recipe(layers=2, stages=1, width=32, heads=2, context=32)
    paths.manifest.write_text(sign(recipe.manifest((KEY.peer_id,)), KEY).to_toml())
    return paths


def processes(starter: int) -> dict[str, bytes]:
    """What anybody sees of the processes: command lines and, for their owner, environments."""
    seen = {}
    parent = psutil.Process(starter)
    for process in (parent, *parent.children(recursive=True)):
        for file in ("cmdline", "environ"):
            data = Path(f"/proc/{process.pid}/{file}").read_bytes()
            seen[f"{file} of {process.name()} {process.pid}"] = data
    return seen


def asked(state: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, bytes]:
    """What commands answer, with the traceback where one fails."""
    seen = {}
    for line in ("status --json", "peers --json", "identity show", "config show --origin"):
        assert run([*line.split(), "--state", str(state)], is_debug=True) == 0
        told = capfd.readouterr()
        seen[line] = (told.out + told.err).encode()
    return seen


def served(log: Path) -> bytes:
    """The page of metrics."""
    events = map(json.loads, log.read_text().splitlines())
    url = next(event["url"] for event in events if event["event"] == "metrics_served")
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


def test_a_running_node_shows_no_secret(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = organise(tmp_path / "state")
    environment = {**os.environ, "SHOAL_LOG_LEVEL": "debug", "SHOAL_LISTEN_HOST": "127.0.0.1"}
    command = [*SHOAL, "swarm", "run", "--debug", "--state", str(paths.root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as organiser:
        try:
            said = read_until_invited(organiser)
            invite = paths.invite.read_text().strip().encode()
            seen = processes(organiser.pid)
            assert any("p2pd" in place for place in seen), seen
            seen |= asked(paths.root, capfd)
            seen["metrics"] = served(paths.log)
            organiser.send_signal(signal.SIGTERM)
            assert organiser.stdout is not None
            seen["terminal"] = said + organiser.stdout.read()
            assert organiser.wait(60) == 0
        finally:
            organiser.kill()
    files = [path for path in paths.root.rglob("*") if path.is_file() and path != paths.key]
    seen |= {f"file {path.name}": path.read_bytes() for path in files}
    assert leaks(seen) == []
    # No secret, but whoever reads a log or a list of processes needs not be invited.
    assert [p for p, data in seen.items() if invite in data and p != "terminal"] == []


def read_until_invited(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    said = b""
    limit = threading.Timer(90, process.kill)
    limit.start()
    try:
        for line in process.stdout:
            said += line
            if b"shoal join shoal1:" in line:
                return said
    finally:
        limit.cancel()
    pytest.fail(f"no invite in {said!r}")


def test_a_damaged_key_is_not_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    paths = organise(tmp_path)
    for damaged in (KEY.to_bytes()[:-1], KEY.to_bytes()[:-1] + b"\0", KEY.seed):
        paths.key.write_bytes(damaged)
        assert run(["identity", "show", "--state", str(tmp_path)], is_debug=True) == 5
        told = capfd.readouterr()
        assert "Traceback" in told.err
        assert leaks({"traceback": (told.out + told.err).encode()}) == []


def test_a_packet_with_a_key_shows_it_nowhere() -> None:
    fields = {
        "swarm": "a" * 64, "key": KEY.to_bytes(), "listen": (), "announce": (), "bootstrap": (),
        "maps_port": False, "folder": "/x", "start_s": 1.0, "dial_s": 1.0,
    }  # fmt: skip
    assert leaks({"repr": repr(Start(**fields)).encode(), "key": repr(KEY).encode()}) == []
    with pytest.raises(ValidationError) as caught:
        Start(key=KEY.seed)  # type: ignore[call-arg]  # pydantic then quotes all that it was given
    assert leaks({"error": str(caught.value).encode()}) == []
    with pytest.raises(ValidationError) as caught:
        Start(**{**fields, "key": [*KEY.seed]})
    assert leaks({"error": str(caught.value).encode()}) == []


def test_no_help_shows_a_secret(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    organise(tmp_path)
    os.environ["SHOAL_STATE"] = str(tmp_path)
    try:
        for command in ([], *([name] for name in typer.main.get_command(app).commands)):
            assert run([*command, "--help"]) == 0
    finally:
        del os.environ["SHOAL_STATE"]
    assert leaks({"help": capfd.readouterr().out.encode()}) == []
