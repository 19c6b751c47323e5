"""What runs in a namespace at one end of a link; prints one JSON object a line.

link_end.py node SIDE     a node on the real transport; on the left also a neighbour of it
link_end.py stock SIDE    a stock host; on the left with one busy and one idle connection
link_end.py ours SIDE     the same with our host
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import torch
import trio
from hosts import SWARM, Server, Silent, open_stream, serving
from link import LEFT, RIGHT

from node.transport import Libp2pNetwork
from protocol.deadlines import Deadlines
from protocol.errors import PeerError
from protocol.keys import NodeKey
from protocol.messages import Assign, Forward
from protocol.ports import PeerChange
from protocol.wire import MEBIBYTE, Limits

PORT = 4001
DEADLINES = Deadlines().scaled(0.5)
RIGHT_NODE, LEFT_NODE, NEIGHBOUR = (NodeKey(bytes([number]) * 32) for number in (1, 2, 3))
BLOCK = torch.zeros(MEBIBYTE // 4)


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "at_s": time.monotonic(), **fields}), flush=True)


# --- nodes -----------------------------------------------------------------------------------


def network(key: NodeKey) -> Libp2pNetwork:
    limits = Limits(MEBIBYTE)
    return Libp2pNetwork(key, SWARM, limits=limits, observer=Silent(), deadlines=DEADLINES)


async def report(mine: Libp2pNetwork) -> None:
    """Take what arrives; say which sessions begin and end."""
    async for event in mine.events:
        if isinstance(event, PeerChange):
            change = "up" if event.is_up else "down"
            say(change, node=mine.peer_id, peer=event.peer, reason=event.reason)


async def send_blocks(mine: Libp2pNetwork) -> None:
    """Send to the right without end; say when it begins to work and when it no longer does."""
    was_delivered = None
    while True:
        try:
            await mine.send(
                RIGHT_NODE.peer_id,
                Forward(step=0, data_node=mine.peer_id, slot=0, attempt=0, stage=1, path=()),
                [BLOCK],
            )
            is_delivered, code = True, ""
        except PeerError as error:
            is_delivered, code = False, error.code
        if is_delivered != was_delivered:
            say("delivered" if is_delivered else "refused", code=code)
        was_delivered = is_delivered
        await trio.sleep(0.1)


async def keep_company(mine: Libp2pNetwork, neighbour: Libp2pNetwork) -> None:
    """Two nodes on the left talk all the time; each error is said."""
    num_sent = 0
    while True:
        try:
            await neighbour.send(mine.peer_id, Assign(step=num_sent, stage=1))
            num_sent += 1
            say("neighbour_delivered", number=num_sent)
        except PeerError as error:
            say("neighbour_refused", code=error.code)
        await trio.sleep(0.25)


async def greet_once(neighbour: Libp2pNetwork) -> None:
    """Have a session with the right that stays idle."""
    while RIGHT_NODE.peer_id not in neighbour.connected():
        try:
            await neighbour.send(RIGHT_NODE.peer_id, Assign(step=0, stage=1))
        except PeerError:
            await trio.sleep(0.1)


async def run_nodes(side: str) -> None:
    keys, ip = ([RIGHT_NODE], RIGHT) if side == "right" else ([LEFT_NODE, NEIGHBOUR], LEFT)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(trio.open_nursery())
        nodes = [network(key) for key in keys]
        for index, node in enumerate(nodes):
            await stack.enter_async_context(node.running([f"/ip4/{ip}/tcp/{PORT + index}"]))
            tasks.start_soon(report, node)
            if side == "left":
                address = f"/ip4/{RIGHT}/tcp/{PORT}/p2p/{RIGHT_NODE.peer_id}"
                node.introduce(RIGHT_NODE.peer_id, [address])
        if side == "left":
            mine, neighbour = nodes
            neighbour.introduce(mine.peer_id, mine.addresses)
            tasks.start_soon(send_blocks, mine)
            tasks.start_soon(keep_company, mine, neighbour)
            tasks.start_soon(greet_once, neighbour)
        await trio.sleep_forever()


# --- bare hosts ------------------------------------------------------------------------------


async def until_listening() -> None:
    """Wait for the right end's port; a stock host does not try again for a minute."""
    while True:
        try:
            stream = await trio.open_tcp_stream(RIGHT, PORT)
        except OSError:
            await trio.sleep(0.1)
        else:
            await stream.aclose()
            return


async def watch(connection: Any, name: str) -> None:
    await connection.muxed_conn.event_closed.wait()
    say("closed", connection=name)


async def keep_busy(stream: Any) -> None:
    """Write a little all the time, so that there are always bytes to acknowledge."""
    try:
        while True:
            await stream.write(bytes(100))
            await trio.sleep(0.1)
    except Exception:  # the end of the connection, as either host reports it
        return


async def connect_twice(host: Server, tasks: trio.Nursery) -> None:
    await until_listening()
    for name in ("idle", "busy"):
        connection = await host.connect(f"/ip4/{RIGHT}/tcp/{PORT}/p2p/{RIGHT_NODE.peer_id}")
        stream = await open_stream(host.host, connection)
        tasks.start_soon(watch, connection, name)
        if name == "busy":
            tasks.start_soon(keep_busy, stream)
    # yamux pings half a second after the start and then every 30 s: idle means between the two
    await trio.sleep(1.5)
    say("connected")


async def run_host(kind: str, side: str) -> None:
    number, ip = (1, RIGHT) if side == "right" else (2, LEFT)
    async with serving(kind, number, f"/ip4/{ip}/tcp/{PORT}") as host, trio.open_nursery() as tasks:
        host.reads.set()
        if side == "left":
            await connect_twice(host, tasks)
        await trio.sleep_forever()


def main(kind: str, side: str) -> None:
    if kind == "node":
        trio.run(run_nodes, side)
    else:
        trio.run(run_host, kind, side)


if __name__ == "__main__":
    main(*sys.argv[1:])
