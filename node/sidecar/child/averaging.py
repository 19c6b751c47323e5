"""hivemind's DecentralizedAverager on a buffer that it shares with the daemon.

hivemind.DHT and the averager each fork, from this program's main thread, and both die with it. All
limits of hivemind are set, for its own are endless: a frozen peer would hang everybody.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import NoCompression
from hivemind.p2p import P2P, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr

from node.sidecar import channel
from node.sidecar.child.lifeline import Lifeline

_FAILURES = (
    AllreduceException, MatchmakingException, P2PDaemonError, P2PHandlerError, ControlFailure,
    AssertionError, CancelledError, EOFError, OSError, RuntimeError, TimeoutError, ValueError,
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


async def connect(_dht: Any, node: Any, addresses: Sequence[str]) -> None:
    """Know other members' DHT nodes. Runs in hivemind's fork, which finds it by its name."""
    places: dict[str, list[Any]] = {}
    for maddr in map(Multiaddr, addresses):
        peer = maddr["p2p"]
        places.setdefault(peer, []).append(maddr.decapsulate(f"/p2p/{peer}"))
    for name, maddrs in places.items():
        peer_id = PeerID.from_base58(name)
        if peer_id != node.peer_id:
            await node.p2p._client.connect(peer_id, maddrs)
            await node.protocol.call_ping(peer_id)


class Averaging:
    """The DHT node of this program, and the averager of the last group that was asked for."""

    def __init__(self) -> None:
        self._dht: Any = None
        self._averager: Any = None
        self._place: tuple[str, str, int] | None = None

    def start(self, request: channel.StartAverager) -> channel.AveragerUp:
        """Start the DHT node and its p2pd."""
        P2P._UNIX_SOCKET_PREFIX = f"/unix{request.folder}/"
        self._dht = DHT(
            start=True,
            host_maddrs=list(request.listen),
            nat_port_map=request.maps_port,
            startup_timeout=request.start_s,
        )
        addresses = self._dht.get_visible_maddrs(latest=True)
        return channel.AveragerUp(addresses=tuple(map(str, addresses)))

    def average(self, request: channel.Average) -> channel.Averaged:
        """Run one round in the shared buffer."""
        place = (request.group, request.buffer, request.num_elements)
        if place != self._place:
            self._place = None
            self._prepare(request)
            self._place = place
        step = self._averager.step(
            weight=1.0, timeout=request.matchmaking_s, allow_retries=False, wait=False
        )
        gathered = step.result(timeout=request.matchmaking_s + request.allreduce_s)
        return channel.Averaged(num_members=len(gathered))

    def _prepare(self, request: channel.Average) -> None:
        if self._averager is not None:
            self._averager.shutdown()
        self._dht.run_coroutine(partial(connect, addresses=request.peers))
        buffer = shared_buffer(request.buffer, request.num_elements)
        self._averager = DecentralizedAverager(
            [buffer],
            self._dht,
            start=True,
            prefix=request.group,
            target_group_size=request.num_members,
            min_group_size=request.num_members,
            # the group forms as soon as it is full
            min_matchmaking_time=request.matchmaking_s / 2,
            request_timeout=request.matchmaking_s / 4,
            allreduce_timeout=request.allreduce_s,
            next_chunk_timeout=request.silence_s,
            sender_timeout=request.silence_s,
            reducer_timeout=2 * request.silence_s,
            compression=NoCompression(),  # 8 bits fail silently with numpy 2.4
            bandwidth=1.0,
            client_mode=False,
            allow_state_sharing=False,
        )


def shared_buffer(path: str, num_elements: int) -> Any:
    """Return the daemon's buffer, mapped; hivemind is kept from moving it into memory of its own.

    ``share_memory_`` copies whatever torch did not share itself: the step would succeed and the
    daemon never see it. A fork inherits the mapping as it is.
    """
    buffer = torch.from_file(path, shared=True, size=num_elements, dtype=torch.float32)
    buffer.share_memory_ = lambda: buffer  # type: ignore[method-assign]
    return buffer


def serve(requests: int, replies: int, lifeline: Lifeline) -> None:
    """Do what the daemon asks, one request after the other."""
    torch.multiprocessing.set_start_method("fork", force=True)
    libc = ctypes.CDLL(None)
    os.register_at_fork(after_in_child=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL))
    averaging = Averaging()
    for call, request in _incoming(requests):
        if isinstance(request, channel.StartAverager):
            lifeline.folder = request.folder
        _write(replies, channel.encode(call, _reply(averaging, request)))


def _reply(averaging: Averaging, request: channel.AveragerRequest) -> channel.Reply:
    try:
        if isinstance(request, channel.StartAverager):
            return averaging.start(request)
        return averaging.average(request)
    except _FAILURES as error:
        return channel.Failure(cause=" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _incoming(descriptor: int) -> Iterator[tuple[int, channel.AveragerRequest]]:
    decoder = channel.Decoder()
    while data := os.read(descriptor, 2**16):
        yield from decoder.averager_requests(data)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
