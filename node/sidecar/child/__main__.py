"""Take the pipes over, hang on to the lifeline, then load the rest."""

from __future__ import annotations

from node.sidecar.child.lifeline import take_pipes


def main() -> None:
    """Serve the daemon at the other end of stdin and stdout until it is gone."""
    requests, replies, lifeline = take_pipes()

    from node.sidecar.child.program import run

    run(requests, replies, lifeline)


if __name__ == "__main__":
    main()
