"""``python -m node.sidecar.child.averager``: hivemind's averager, in a process of its own.

It is no task of the DHT's side-car, because it forks, and its failures are mended by replacing it.
"""

from __future__ import annotations

from node.sidecar.child.lifeline import take_pipes


def main() -> None:
    """Serve the daemon at the other end of stdin and stdout until it is gone."""
    requests, replies, lifeline = take_pipes()

    from node.sidecar.child.averaging import serve

    serve(requests, replies, lifeline)


if __name__ == "__main__":
    main()
