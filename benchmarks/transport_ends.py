"""One end of a link for the transport benchmark; takes orders on stdin, answers on stdout.

    transport_ends.py KIND receive HOST
    transport_ends.py KIND send HOST ADDRESS

KIND is "shoal" (our data plane), "raw" (streams of a stock py-libp2p host) or "hivemind" (streams
of its P2P, which runs go-libp2p in a process of its own). On all three, ``send`` returns when the
other end has the whole payload in memory and has said so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from ends import cpu_s, say

MIB = 2**20
PROTOCOL = "/shoal-benchmark/1"
PING_BYTES, PING_EVERY_S, SETTLE_S = 100, 0.05, 1.0
IN_FLIGHT = 8  # frames, while control is measured
_LENGTH_BYTES = 8
_READ_BYTES = MIB


class Sender:
    """What the orders are carried out with; one subclass for each kind."""

    async def send(self, payload: bytearray) -> None:
        """Deliver a payload."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Deliver a small message."""
        raise NotImplementedError


# --- orders ----------------------------------------------------------------------------------


async def take_orders(sender: Sender | None) -> None:
    """Obey until stdin ends."""
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        order = json.loads(line)
        before, started = cpu_s(), time.perf_counter()
        answer: dict[str, Any] = {}
        if sender is not None and order["do"] == "bulk":
            await bulk(sender, order["bytes"], order["count"])
        elif sender is not None and order["do"] == "control":
            answer["ms"] = await control(sender, order["bytes"], order["seconds"])
        answer |= {"s": time.perf_counter() - started, "cpu_s": cpu_s() - before, "at": cpu_s()}
        say(answer)


async def bulk(sender: Sender, num_bytes: int, count: int) -> None:
    """Deliver ``count`` frames, as many under way as the transport lets."""
    payload = bytearray(os.urandom(num_bytes))
    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(sender.send, payload)


async def control(sender: Sender, num_bytes: int, seconds: float) -> list[float]:
    """Round trips in ms of small messages, while frames of ``num_bytes`` (0: none) are sent."""
    payload, is_over, found = bytearray(num_bytes), False, []

    async def keep_sending() -> None:
        while not is_over:
            await sender.send(payload)

    async with anyio.create_task_group() as tasks:
        for _ in range(IN_FLIGHT if num_bytes else 0):
            tasks.start_soon(keep_sending)
        await anyio.sleep(SETTLE_S)
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            await sender.ping()
            found.append((time.perf_counter() - began) * 1000)
            await anyio.sleep(PING_EVERY_S)
        is_over = True
    return found


# --- our data plane --------------------------------------------------------------------------


class _Silent:
    """An Observer of nothing."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


async def shoal(role: str, host: str, address: str) -> None:
    """A Libp2pNetwork at either end; time limits are wide, because the link may be slow."""
    import torch

    from node.transport import Libp2pNetwork
    from protocol.deadlines import Deadlines
    from protocol.keys import NodeKey, PeerId
    from protocol.messages import Assign, Forward
    from protocol.wire import Limits

    network = Libp2pNetwork(
        NodeKey(os.urandom(32)), "ab" * 32, limits=Limits(64 * MIB), observer=_Silent(),
        deadlines=Deadlines().scaled(10),
    )  # fmt: skip
    far = PeerId(address.rpartition("/")[2])

    class Ours(Sender):
        async def send(self, payload: bytearray) -> None:
            work = Forward(step=0, data_node=far, slot=0, attempt=0, stage=1, path=())
            await network.send(far, work, [torch.frombuffer(payload, dtype=torch.uint8)])

        async def ping(self) -> None:
            await network.send(far, Assign(step=0, stage=1))

    async def take_events() -> None:
        async for _ in network.events:
            pass

    async with network.running([f"/ip4/{host}/tcp/0"]), anyio.create_task_group() as tasks:
        tasks.start_soon(take_events)
        if role == "send":
            network.introduce(far, [address])
            await network.send(far, Assign(step=0, stage=1))
        say({"address": network.addresses[0]})
        await take_orders(Ours() if role == "send" else None)
        tasks.cancel_scope.cancel()


# --- bare streams: a length, then so many bytes; the answer is one byte -----------------------


class Framed(Sender):
    """Frames on one stream, pings on another one of the same connection."""

    def __init__(self, frames: Any, pings: Any) -> None:
        self._frames, self._pings = frames, pings
        self._turn, self._sent = anyio.Lock(), deque[anyio.Event]()

    async def send(self, payload: bytearray) -> None:
        """Write a frame; return at its acknowledgement."""
        done = anyio.Event()
        async with self._turn:
            self._sent.append(done)
            await self._frames.write(len(payload).to_bytes(_LENGTH_BYTES, "big"))
            await self._frames.write(payload)
        await done.wait()

    async def ping(self) -> None:
        """Write a small frame; return at its acknowledgement."""
        message = PING_BYTES.to_bytes(_LENGTH_BYTES, "big") + bytes(PING_BYTES)
        await self._pings.write(message)
        await self._pings.read(1)

    async def take_acks(self) -> None:
        """Settle frames in their order."""
        while acks := await self._frames.read(_READ_BYTES):
            for _ in acks:
                self._sent.popleft().set()


async def answer(stream: Any) -> None:
    """The receiver's part on one stream: take each frame into memory of its own, then say so."""
    while True:
        size = int.from_bytes(await _exactly(stream, _LENGTH_BYTES), "big")
        await _exactly(stream, size)
        await stream.write(b"+")


async def _exactly(stream: Any, size: int) -> bytearray:
    data, at = bytearray(size), 0
    while at < size:
        piece = await stream.read(min(_READ_BYTES, size - at))
        if not piece:
            raise EOFError
        data[at : at + len(piece)] = piece
        at += len(piece)
    return data


async def raw(role: str, host: str, address: str) -> None:
    """A stock host, but for its habit of dialling by itself."""
    from libp2p import new_host
    from libp2p.custom_types import TProtocol
    from libp2p.network.config import ConnectionConfig
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    own = new_host(connection_config=ConnectionConfig(min_connections=0, low_watermark=0))
    own.set_stream_handler(TProtocol(PROTOCOL), _until_end)
    async with own.run([Multiaddr(f"/ip4/{host}/tcp/0")]), anyio.create_task_group() as tasks:
        sender = None
        if role == "send":
            info = info_from_p2p_addr(Multiaddr(address))
            await own.connect(info)
            streams = [await own.new_stream(info.peer_id, [TProtocol(PROTOCOL)]) for _ in "fp"]
            sender = Framed(*streams)
            tasks.start_soon(sender.take_acks)
        port = own.get_addrs()[0].value_for_protocol("tcp")
        say({"address": f"/ip4/{host}/tcp/{port}/p2p/{own.get_id()}"})
        await take_orders(sender)
        tasks.cancel_scope.cancel()


async def _until_end(stream: Any) -> None:
    try:
        await answer(stream)
    except Exception:  # the sender has left, as this library says it
        return


class _Asyncio:
    """A pair of asyncio streams under the names that py-libp2p's stream has."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, num_bytes: int) -> bytes:
        return bytes(await self._reader.read(num_bytes))

    async def write(self, data: bytes | bytearray) -> None:
        self._writer.write(data)
        await self._writer.drain()


async def hivemind(role: str, host: str, address: str) -> None:
    """Its P2P as its averagers use it, without what finds ways through routers."""
    from hivemind.p2p import P2P, PeerID

    options: dict[str, Any] = {
        "host_maddrs": [f"/ip4/{host}/tcp/0"], "auto_nat": False, "nat_port_map": False,
        "use_relay": False, "dht_mode": "server",
    }  # fmt: skip
    p2p = await P2P.create(initial_peers=[address] if role == "send" else None, **options)

    async def take(_: Any, reader: Any, writer: Any) -> None:
        await _until_end(_Asyncio(reader, writer))

    await p2p.add_binary_stream_handler(PROTOCOL, take)
    async with anyio.create_task_group() as tasks:
        sender = None
        if role == "send":
            far = PeerID.from_base58(address.rpartition("/")[2])
            opened = [await p2p.call_binary_stream_handler(far, PROTOCOL) for _ in "fp"]
            sender = Framed(*(_Asyncio(reader, writer) for _, reader, writer in opened))
            tasks.start_soon(sender.take_acks)
        say({"address": str((await p2p.get_visible_maddrs())[0])})
        await take_orders(sender)
        tasks.cancel_scope.cancel()
    await p2p.shutdown()


KINDS: dict[str, tuple[Callable[[str, str, str], Awaitable[None]], str]] = {
    "shoal": (shoal, "trio"),
    "raw": (raw, "trio"),
    "hivemind": (hivemind, "asyncio"),
}


def main(kind: str, role: str, host: str, address: str = "") -> None:
    """Run one end until stdin ends."""
    run, backend = KINDS[kind]
    anyio.run(run, role, host, address, backend=backend)


if __name__ == "__main__":
    main(*sys.argv[1:])
