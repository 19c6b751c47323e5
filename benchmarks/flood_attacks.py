"""One hostile process for the flood benchmark: floods a node in one way and says what it did.

    flood_attacks.py ATTACK ADDRESS SWARM SECONDS

ADDRESS is the victim's on the data plane. Prints one JSON object: how much was done, how many
sessions that took, and after how long the first was cut; before that, when it begins, "ready".
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass

import torch
import trio

from node.transport.addresses import endpoint
from node.transport.control import CONTROL_CODES, Beat
from node.transport.dialling import AddressBook, Dial, Dialler
from node.transport.greeting import Greeter
from node.transport.host import HardenedHost
from node.transport.stream import MuxedStream
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.messages import FetchBoundary, FetchState, Forward, Message, Presence, Release
from protocol.wire import Codec, Limits

CODEC = Codec(Limits(max_tensor_bytes=1 << 30), CONTROL_CODES)
LIMITS = Deadlines()
REST_S = 0.02
FOREVER = 2**40
FLOW = {"step": 0, "slot": 0, "attempt": 0}


@dataclass
class Done:
    """What an attack got done."""

    amount: int = 0
    sessions: int = 0
    cut_after_s: float | None = None


class Silent:
    """An observer that looks away."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Nothing."""

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Nothing."""

    def event(self, name: str, **fields: object) -> None:
        """Nothing."""


@dataclass
class Attack:
    """The victim, and what has been done to it."""

    address: str
    swarm: str
    done: Done
    began: float

    @property
    def peer(self) -> PeerId:
        """The victim's PeerID."""
        return PeerId(self.address.rpartition("/p2p/")[2])

    def cut(self) -> None:
        """The victim ended a session."""
        if self.done.cut_after_s is None:
            self.done.cut_after_s = round(trio.current_time() - self.began, 2)


@asynccontextmanager
async def session(attack: Attack, key: NodeKey) -> AsyncIterator[dict[str, MuxedStream]]:
    """A proper session with the victim, made by hand."""

    async def refuse(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.abort()

    host = HardenedHost(key, refuse, LIMITS, Silent())
    book = AddressBook(1.0, None)  # type: ignore[arg-type]
    book.learn(attack.peer, [attack.address])
    async with host.running(["/ip4/127.0.0.1/tcp/0"]):
        greeter = Greeter(attack.swarm, CODEC, time.time)
        meeting = await Dialler(host, greeter, book, LIMITS).dial(Dial(attack.peer))
        assert meeting is not None
        for stream in meeting.streams.values():
            stream.conn.adopted.set()
        attack.done.sessions += 1
        yield dict(meeting.streams)


def frames(message: Message | Beat, *tensors: torch.Tensor) -> Callable[[int], bytes]:
    """One message as a frame of any sequence number."""
    made = CODEC.encode(message, tensors)
    is_counted = isinstance(message, Message)
    return lambda number: b"".join(made.buffers(number if is_counted else 0, 0))


async def sessions_of(attack: Attack, lane: str, frame: Callable[[int], bytes], size: int) -> None:
    """Flood a lane, ``size`` frames with each write; when it is cut off, begin again."""
    key = NodeKey(secrets.token_bytes(32))
    while True:
        with suppress(Exception):  # cut off, refused, or both
            async with session(attack, key) as streams:
                for number in range(1, FOREVER, size):
                    data = b"".join(frame(n) for n in range(number, number + size))
                    with trio.fail_after(5.0):  # it reads no more
                        await streams[lane].write_buffers([data])
                    attack.done.amount += size
        attack.cut()
        await trio.sleep(REST_S)


async def garbage(attack: Attack) -> None:
    """Bytes that are no frame."""
    await sessions_of(attack, "control", lambda _: secrets.token_bytes(200), 10)


async def small_frames(attack: Attack) -> None:
    """Valid messages about microbatches that nobody has."""
    message = Release(**FLOW, data_node=attack.peer)
    await sessions_of(attack, "control", frames(message), 20)


async def presences(attack: Attack) -> None:
    """An authority is asked for a stage, and for the decision, in each message."""
    message = Presence(step=0, stage=-1, capacity=1, digest=None)
    await sessions_of(attack, "control", frames(message), 20)


async def questions(attack: Attack) -> None:
    """Questions whose answers are never taken."""
    message = FetchBoundary(**FLOW, data_node=attack.peer, direction="gradient", stage=0)
    await sessions_of(attack, "control", frames(message), 20)


async def state(attack: Attack) -> None:
    """The state is asked for again and again."""
    await sessions_of(attack, "control", frames(FetchState(step=0, stage=0, chunk=0)), 20)


async def heartbeats(attack: Attack) -> None:
    """Heartbeats, which are never acknowledged."""
    beat = Beat(
        step=0, last_finished_s_ago=None, record_seen=0, sent_s=0.0, echo_s=None, held_s=0.0
    )
    await sessions_of(attack, "control", frames(beat), 20)


async def early(attack: Attack) -> None:
    """Tensors of a step that is not decided yet: 256 KiB each."""
    message = Forward(step=2**40, data_node=attack.peer, slot=0, attempt=0, stage=0, path=())
    await sessions_of(attack, "bulk", frames(message, torch.zeros(1 << 16)), 1)


async def claims(attack: Attack) -> None:
    """Frames that claim 2^63 bytes."""
    message = Forward(step=1, data_node=attack.peer, slot=0, attempt=0, stage=0, path=())
    whole = frames(message)(1)
    forged = whole[:10] + (2**63).to_bytes(8, "big") + whole[18:]
    await sessions_of(attack, "bulk", lambda _: forged, 1)


async def connections(attack: Attack) -> None:
    """TCP connections that say nothing and stay."""
    host, port = endpoint(attack.address.partition("/p2p/")[0])
    held: list[trio.SocketStream] = []
    while True:
        with suppress(OSError):
            held.append(await trio.open_tcp_stream(host, port))
            attack.done.amount += 1
        if len(held) > 500:
            await held.pop(0).aclose()


async def handshakes(attack: Attack) -> None:
    """Handshakes that hang: a hundred at once, a byte now and then."""
    host, port = endpoint(attack.address.partition("/p2p/")[0])

    async def hang() -> None:
        while True:
            with suppress(OSError, trio.BrokenResourceError):
                async with await trio.open_tcp_stream(host, port) as stream:
                    attack.done.amount += 1
                    for byte in b"\x13/multistream/1.0.0\n" * 10:
                        await stream.send_all(bytes([byte]))
                        await trio.sleep(0.2)
            attack.cut()
            await trio.sleep(REST_S)

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(hang)


async def identities(attack: Attack) -> None:
    """Sessions, each of another node."""

    async def one() -> None:
        while True:
            with suppress(Exception):  # refused
                async with session(attack, NodeKey(secrets.token_bytes(32))):
                    attack.done.amount += 1
            await trio.sleep(REST_S)

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(one)


async def streams(attack: Attack) -> None:
    """Streams on one connection."""

    async def refuse(_: PeerId, stream: MuxedStream) -> None:
        stream.conn.abort()

    while True:
        host = HardenedHost(NodeKey(secrets.token_bytes(32)), refuse, LIMITS, Silent())
        with suppress(Exception):  # cut off
            async with host.running(["/ip4/127.0.0.1/tcp/0"]):
                muxer = await host.connect(attack.peer, attack.address)
                attack.done.sessions += 1
                while not muxer.event_closed.is_set():
                    await muxer.open_stream()
                    attack.done.amount += 1
                    await trio.lowlevel.checkpoint()
        attack.cut()
        await trio.sleep(REST_S)


ATTACKS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    a.__name__: a
    for a in (
        garbage, claims, small_frames, presences, questions, state, heartbeats, early, connections,
        handshakes, identities, streams,
    )
}  # fmt: skip


async def run(attack: Attack, name: str, seconds: float) -> None:
    """Attack for so long."""
    attack.began = trio.current_time()
    with trio.move_on_after(seconds):
        await ATTACKS[name](attack)


def main() -> None:
    """Do as the arguments say."""
    name, address, swarm, seconds = sys.argv[1:]
    done = Done()
    print("ready", flush=True)
    trio.run(run, Attack(address, swarm, done, 0.0), name, float(seconds))
    print(json.dumps(asdict(done)), flush=True)


if __name__ == "__main__":
    main()
