"""`shoal` as process 1 of a container without an init: signals, exit status, no terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fake_daemon import fake_path

from protocol.invite import Invite
from protocol.keys import NodeKey

SHOAL = (sys.executable, "-c", "from cli.main import main; main()")
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
# Whoever is not root may still make namespaces of a user's own, where the kernel allows it.
UNSHARE = ALONE if os.geteuid() == 0 else (*ALONE, "--user", "--map-root-user")


def can_unshare() -> bool:
    return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="this system gives us no PID namespace")
def test_sigterm_reaches_the_daemon_and_the_exit_is_clean(tmp_path: Path) -> None:
    peer = NodeKey(b"o" * 32).peer_id
    seed = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
    invite = Invite(swarm_id="a" * 64, organiser=peer, seeds=(seed,)).encode()
    environment = {
        **os.environ,
        "PYTHONPATH": fake_path(tmp_path),
        "SHOAL_STATE": str(tmp_path / "state"),
    }
    with subprocess.Popen(
        [*UNSHARE, *SHOAL, "join", invite],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=environment,
    ) as outer:  # fmt: skip
        assert outer.stdout is not None
        try:
            for line in outer.stdout:
                if line.startswith("starting: no stage yet"):
                    break
            (first,) = psutil.Process(outer.pid).children()
            daemons = first.children()
            assert len(daemons) == 1
            first.send_signal(signal.SIGTERM)
            assert "handing over and leaving" in outer.stdout.read()
            assert outer.wait(30) == 0
            assert not daemons[0].is_running()
        finally:
            outer.kill()
