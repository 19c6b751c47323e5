"""``python -m node.main --state DIR``: one daemon in the foreground, for the CLI and for tests."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon of a state directory; return its exit status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _quit)
    # loading them takes seconds, in which a signal must find its handler
    from node.config import load_config
    from node.daemon import run_daemon
    from node.paths import state_paths
    from protocol.errors import as_shoal_error

    parser = argparse.ArgumentParser(prog="node.main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--lifeline-fd", type=int, default=None)
    parser.add_argument("--no-retry", action="store_true")
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args(arguments)
    paths = state_paths(options.state)
    try:
        loaded, retries = load_config(paths.config), not options.no_retry
        return run_daemon(paths, loaded, os.environ, options.lifeline_fd, retries=retries)
    except Exception as error:  # boundary: whatever it was, its owner gets two lines
        if options.debug:
            traceback.print_exc()
        known = as_shoal_error(error)
        print(f"error[{known.code}]: {known.cause}\nremedy: {known.hint}", file=sys.stderr)
        return known.exit_status


def _quit(_number: int, _frame: FrameType | None) -> None:
    """There is nothing to hand over and no child yet."""
    os._exit(0)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # all is closed; taking torch and libp2p apart would take seconds
