"""Nodes that start at the same moment, or all again on other ports, become one swarm."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from test_sidecar import HEAL_S, Member, eventually, start

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simultaneous_start.py"


def rounds(*words: str) -> dict[str, dict[str, float]]:
    """Play rounds of eight side-cars and return what the script tells of each kind of start."""
    command = [sys.executable, str(SCRIPT), "--json", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_eight_at_once_make_one_swarm() -> None:
    told = rounds("--rounds", "1")
    assert told["together"]["one_swarm"] == 1


@pytest.mark.slow
def test_all_start_again_on_other_ports() -> None:
    """At once, and one after the other: found again within two lifetimes of a record."""
    told = rounds("--rounds", "2", "--phases", "all")
    assert [kind["one_swarm"] for kind in told.values()] == [2, 2, 2]


async def test_two_halves_meet_soon() -> None:
    """A seed that was not up yet is called again, though others have been found meanwhile."""
    where = f"/ip4/127.0.0.1/tcp/{free_port()}"
    late = Member(3, listen=(where,))
    late_seed = f"{where}/p2p/{late.sidecar.peer_id}"
    async with trio.open_nursery() as nursery:
        first = Member(1, bootstrap=(late_seed,))
        await nursery.start(first.sidecar.run)
        second = Member(2, bootstrap=first.sidecar.addresses)
        await start(nursery, second)
        await eventually(lambda: first.sidecar.num_neighbours, HEAL_S)
        await nursery.start(late.sidecar.run)
        await start(nursery, Member(4, bootstrap=(late_seed,)))
        await eventually(lambda: first.sidecar.num_neighbours >= 2, HEAL_S)
        nursery.cancel_scope.cancel()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
