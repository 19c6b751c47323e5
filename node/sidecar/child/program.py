"""The side-car's event loop: requests in, replies out, until the daemon or p2pd is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from node.sidecar import channel
from node.sidecar.child.answers import FAILURES, Answers, one_line, start_node
from node.sidecar.child.lifeline import Lifeline
from protocol.errors import ProtocolViolation


def run(requests: int, replies: int, lifeline: Lifeline) -> None:
    """Serve requests from one pipe into the other."""
    # hivemind leaves the failures of its own background tasks unread.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    asyncio.run(_serve(requests, replies, lifeline))


async def _serve(requests: int, replies: int, lifeline: Lifeline) -> None:
    writer = await _writer(replies)
    incoming = _requests(requests)
    call, start = await anext(incoming)
    if not isinstance(start, channel.Start):
        raise ProtocolViolation("the first request must be start")
    lifeline.folder = start.folder
    try:
        node = await start_node(start)
    except FAILURES as error:
        writer.write(channel.encode(call, channel.Failure(cause=one_line(error))))
        await writer.drain()
        return
    answers = Answers(start, node)
    writer.write(channel.encode(call, await answers.pong()))

    async def answer(number: int, request: channel.Request) -> None:
        writer.write(channel.encode(number, await answers.answer(request)))
        await writer.drain()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_end_with(node.p2p, lifeline))
        tasks.create_task(answers.keep_joined())
        async for number, request in incoming:
            tasks.create_task(answer(number, request))


async def _writer(descriptor: int) -> asyncio.StreamWriter:
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(descriptor, "wb")
    )
    return asyncio.StreamWriter(transport, protocol, None, loop)


async def _requests(descriptor: int) -> AsyncIterator[tuple[int, channel.Request]]:
    loop = asyncio.get_running_loop()
    reader, decoder = asyncio.StreamReader(), channel.Decoder()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb")
    )
    while data := await reader.read(2**16):
        for number, request in decoder.requests(data):
            yield number, request


async def _end_with(p2p: Any, lifeline: Lifeline) -> None:
    """A DHT node without its p2pd still says that all is well, so it must not outlive it."""
    status = await p2p._child.wait()
    print(f"p2pd ended with status {status}", file=sys.stderr, flush=True)
    lifeline.end()
