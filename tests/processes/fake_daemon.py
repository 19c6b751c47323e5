"""Stands in for ``node.main`` where a test is about who starts, watches and ends daemons.

It answers /status and /steps on its control socket, writes an invite, and ends on SIGTERM or with
its lifeline. SHOAL_FAKE makes it misbehave: ``dies``, ``stubborn`` (ignores SIGTERM), ``litters``
(leaves a child behind). It imports the standard library alone, so that it starts at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

STATUS = {"peer_id": "p", "swarm": "s", "name": "n", "role": "volunteer", "committed_total": 1}


class Handler(BaseHTTPRequestHandler):
    """The part of the control API that the CLI polls."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        body = json.dumps([] if path == "/steps" else STATUS).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "local"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """HTTP on a unix socket."""

    daemon_threads = True


def fake_path(folder: Path) -> str:
    """Return a PYTHONPATH under which ``python -m node.main`` is this file."""
    package = folder / "fake" / "node"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").symlink_to(__file__)
    return str(package.parent)


def watch(lifeline: int) -> None:
    """End the process when the pipe ends."""
    os.read(lifeline, 1)
    os._exit(9)


def main() -> None:
    """Play the daemon that SHOAL_FAKE names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path)
    parser.add_argument("--lifeline-fd", type=int)
    parser.add_argument("--no-retry", action="store_true")
    options = parser.parse_args()
    behaviour = os.environ.get("SHOAL_FAKE", "")
    print("fake daemon started", file=sys.stderr, flush=True)
    if behaviour == "dies":
        print("error[resource]: no memory", file=sys.stderr)
        sys.exit(6)
    threading.Thread(target=watch, args=(options.lifeline_fd,), daemon=True).start()
    stubborn = behaviour == "stubborn"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else lambda *_: os._exit(0))
    if behaviour == "litters":
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    (options.state / "control.sock").unlink(missing_ok=True)
    server = Server(str(options.state / "control.sock"), Handler)
    (options.state / "invite").write_text("shoal1:fake\n")
    server.serve_forever()


if __name__ == "__main__":
    main()
