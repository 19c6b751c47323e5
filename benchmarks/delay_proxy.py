"""Passes TCP connections on and holds every byte for half a round trip, each way.

delay_proxy.py HOST TARGET_PORT RTT_MS     prints the port that it listens on
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Coroutine
from typing import Any

_PIECE_BYTES = 1 << 16
# More than any path of the benchmark holds in flight (200 Mbit/s x 100 ms are 2.5 MB).
_HELD_BYTES = 1 << 24


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Copy one direction; pieces keep their distances."""
    loop = asyncio.get_running_loop()
    held: deque[tuple[float, bytes]] = deque()
    changed, num_held = asyncio.Event(), 0

    async def release() -> None:
        nonlocal num_held
        while True:
            while not held:
                changed.clear()
                await changed.wait()
            due, piece = held.popleft()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                writer.close()
                return
            writer.write(piece)
            num_held -= len(piece)
            await writer.drain()

    releasing = asyncio.ensure_future(release())
    try:
        while piece := await reader.read(_PIECE_BYTES):
            held.append((loop.time() + delay_s, piece))
            num_held += len(piece)
            changed.set()
            while num_held > _HELD_BYTES:
                await asyncio.sleep(delay_s / 10)
        held.append((loop.time() + delay_s, b""))
        changed.set()
        await releasing
    except OSError:
        releasing.cancel()
        writer.close()


async def serve(host: str, target_port: int, rtt_s: float) -> None:
    """Listen on a free port of ``host`` until killed."""
    running: set[asyncio.Future[None]] = set()

    def keep(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(running.discard)

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, target_port)
        keep(carry(reader, far_writer, rtt_s / 2))
        keep(carry(far_reader, writer, rtt_s / 2))

    server = await asyncio.start_server(take, host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1000))
