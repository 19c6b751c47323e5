"""Take the pipes over, hang on to the lifeline, then load the rest."""

from __future__ import annotations

import os

from node.sidecar.child.lifeline import Lifeline


def main() -> None:
    """Serve the daemon at the other end of stdin and stdout until it is gone."""
    requests, replies = os.dup(0), os.dup(1)
    lifeline = Lifeline(requests)
    lifeline.start()
    # Libraries and p2pd must neither write between our frames nor hold our pipe open.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)

    from node.sidecar.child.program import run

    run(requests, replies, lifeline)


if __name__ == "__main__":
    main()
