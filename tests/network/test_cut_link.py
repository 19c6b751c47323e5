"""The link between two real processes is cut: nobody says goodbye, packets are simply lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from link import Link, linked
from link_end import DEADLINES, LEFT_NODE, NEIGHBOUR, RIGHT_NODE

PROGRAM = Path(__file__).with_name("link_end.py")
ROOT = PROGRAM.parents[2]
# Two interpreters start, or a node dials again; on a busy machine that takes long.
START_S = 60.0
# What a busy machine may add to a deadline.
SLACK_S = 5.0


@pytest.fixture
def link() -> Iterator[Link]:
    with linked() as made:
        yield made


class End:
    """One process of the link and what it has said."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.said: list[dict[str, Any]] = []
        self._more = trio.Event()

    async def listen(self) -> None:
        assert self.process.stdout is not None
        rest = b""
        async for data in self.process.stdout:
            *lines, rest = (rest + data).split(b"\n")
            self.said += map(json.loads, lines)
            more, self._more = self._more, trio.Event()
            more.set()

    def heard(self, event: str, after_s: float = 0.0, **fields: object) -> list[dict[str, Any]]:
        """What was said of this kind after a moment of the monotonic clock."""
        return [
            line
            for line in self.said
            if line["event"] == event and line["at_s"] > after_s and fields.items() <= line.items()
        ]

    async def hear(self, event: str, after_s: float = 0.0, **fields: object) -> dict[str, Any]:
        """Wait until it is said."""
        while not (lines := self.heard(event, after_s, **fields)):
            await self._more.wait()
        return lines[0]


@asynccontextmanager
async def ends(link: Link, kind: str) -> AsyncIterator[tuple[End, End]]:
    """Run the program at both ends."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with trio.open_nursery() as nursery:
        started = []
        for namespace, side in ((link.left, "left"), (link.right, "right")):
            command = ["ip", "netns", "exec", namespace, sys.executable, str(PROGRAM), kind, side]
            run = partial(trio.run_process, stdout=subprocess.PIPE, env=environment, check=False)
            started.append(End(await nursery.start(run, command)))
            nursery.start_soon(started[-1].listen)
        yield started[0], started[1]
        assert [end.process.returncode for end in started] == [None, None]
        nursery.cancel_scope.cancel()


async def test_a_cut_link_ends_the_sessions_across_it_and_nothing_else(link: Link):
    """One session is busy and one is idle; a third one does not cross the link."""
    async with ends(link, "node") as (left, right):
        with trio.fail_after(START_S):
            await left.hear("delivered")
            for node in (LEFT_NODE, NEIGHBOUR):
                await right.hear("up", peer=node.peer_id)
                await left.hear("up", node=node.peer_id, peer=RIGHT_NODE.peer_id)
        link.cut()
        cut_s = time.monotonic()
        deadline_s = DEADLINES.session_silence_s + 2 * DEADLINES.heartbeat_s
        with trio.fail_after(deadline_s + SLACK_S):
            for node in (LEFT_NODE, NEIGHBOUR):
                await left.hear("down", cut_s, node=node.peer_id, peer=RIGHT_NODE.peer_id)
                await right.hear("down", cut_s, node=RIGHT_NODE.peer_id, peer=node.peer_id)
            await left.hear("refused", cut_s)
        link.heal()
        healed_s = time.monotonic()
        with trio.fail_after(START_S):
            await left.hear("delivered", healed_s)
            await left.hear("neighbour_delivered", healed_s)
        assert not left.heard("neighbour_refused")
        assert not left.heard("down", node=LEFT_NODE.peer_id, peer=NEIGHBOUR.peer_id)


@pytest.mark.parametrize("kind", ["stock", "ours"])
async def test_the_kernel_finds_out_without_a_heartbeat(link: Link, kind: str):
    """Keepalive ends the idle connection, TCP_USER_TIMEOUT the one with bytes under way."""
    async with ends(link, kind) as (left, _):
        with trio.fail_after(START_S):
            await left.hear("connected")
        link.cut()
        with trio.move_on_after(5.0 if kind == "stock" else 15.0):
            for name in ("idle", "busy"):
                await left.hear("closed", connection=name)
        closed = {line["connection"] for line in left.heard("closed")}
    assert closed == (set() if kind == "stock" else {"idle", "busy"})
