"""What the side-car does for its daemon, and how its DHT node stays joined."""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

from node.sidecar import channel
from node.sidecar.child.dht import (
    DHTID,
    P2P,
    ControlFailure,
    DHTNode,
    Multiaddr,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
)
from node.sidecar.child.seeds import Seeds
from node.sidecar.child.validator import RecordValidator
from protocol.errors import ProtocolViolation
from protocol.records import open_record

FAILURES = (
    P2PDaemonError, P2PHandlerError, ControlFailure, ProtocolViolation,
    OSError, EOFError, TimeoutError, ValueError,
)  # fmt: skip
_SEARCH_S, _PROBE_S = 2.0, 10.0
# p2pd ends by itself if nobody talks to it this long after its start.
_P2PD_IDLE_S = 10.0
_NUM_WITNESSES = 3
_MAX_PEERS = 16


async def start_node(start: channel.Start) -> Any:
    """Start p2pd and a DHT node that knows nobody yet."""
    P2P._UNIX_SOCKET_PREFIX = f"/unix{start.folder}/"
    key_file = f"{start.folder}/key"
    descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(start.key)
    try:
        p2p = await P2P.create(
            host_maddrs=start.listen,
            announce_maddrs=start.announce or None,
            identity_path=key_file,
            # It takes every key for RSA and raises for ours.
            check_if_identity_free=False,
            nat_port_map=start.maps_port,
            startup_timeout=start.start_s,
            idle_timeout=_P2PD_IDLE_S,
        )
    finally:
        os.unlink(key_file)
    nodes_key, manifest_key = (key_of(kind, start.swarm) for kind in ("nodes", "manifest"))
    return await DHTNode.create(
        p2p=p2p,
        # The same place in the DHT after a restart, so that others' tables stay right.
        node_id=DHTID.generate(source=str(p2p.peer_id)),
        record_validator=RecordValidator(
            start.swarm, nodes_key.to_bytes(), manifest_key.to_bytes(), time.time
        ),
        cache_locally=False,
        cache_on_store=False,
    )


def name_of(kind: str, swarm: str) -> str:
    """Return the DHT's name for one kind of a swarm's records."""
    return f"shoal/{swarm}/{kind}"


def key_of(kind: str, swarm: str) -> Any:
    """Return the DHTID of ``name_of``."""
    return DHTID.generate(source=name_of(kind, swarm))


def one_line(error: BaseException) -> str:
    """Return an error as a cause that fits a log line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


class Answers:
    """Does what the daemon asks of a running node."""

    def __init__(self, start: channel.Start, node: Any) -> None:
        self._start, self._node = start, node
        self._seeds = Seeds(start.bootstrap, random.Random())  # noqa: S311 - jitter, not secrets
        self._nodes = name_of("nodes", start.swarm)
        self._manifest = name_of("manifest", start.swarm)

    async def answer(self, request: channel.Request) -> channel.Reply:
        """Return the reply to a request; a Failure if hivemind or p2pd could not do it."""
        try:
            return await self._do(request)
        except FAILURES as error:
            return channel.Failure(cause=one_line(error))

    async def _do(self, request: channel.Request) -> channel.Reply:
        reply: channel.Reply
        match request:
            case channel.Publish():
                reply = await self._publish(request.record)
            case channel.Confirm():
                reply = await self._confirm(request.record)
            case channel.Lookup():
                reply = channel.Records(records=tuple((await self._records()).values()))
            case channel.StoreManifest():
                reply = await self._store_manifest(request.text, request.expires_at)
            case channel.FetchManifest():
                found = await self._node.get(self._manifest, latest=True)
                reply = channel.ManifestText(text=found.value if found else None)
            case channel.Ping():
                reply = await self.pong()
            case channel.Start():
                reply = channel.Failure(cause="the side-car runs already")
        return reply

    async def pong(self) -> channel.Pong:
        """Ask p2pd for its addresses and connections."""
        addresses = await self._node.get_visible_maddrs(latest=True)
        connected = await self._node.p2p.list_peers()
        peers = [f"{a}/p2p/{info.peer_id}" for info in connected for a in info.addrs[:1]]
        return channel.Pong(
            addresses=tuple(map(str, addresses)),
            peers=tuple(peers[:_MAX_PEERS]),
            num_neighbours=self._num_neighbours,
        )

    @property
    def _num_neighbours(self) -> int:
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    async def _publish(self, data: bytes) -> channel.Stored:
        record = open_record(data, swarm=self._start.swarm, now=time.time())
        ok = await self._node.store(
            self._nodes, data, subkey=record.peer_id, expiration_time=record.expires_at
        )
        # ``ok`` is the word of whichever node answered last: read back before giving up.
        return channel.Stored(ok=ok or (await self._records()).get(record.peer_id) == data)

    async def _store_manifest(self, text: str, expires_at: float) -> channel.Stored:
        ok = await self._node.store(self._manifest, text, expiration_time=expires_at)
        # Refused too where a copy lies that expires later, which is as good.
        found = None if ok else await self._node.get(self._manifest, latest=True)
        return channel.Stored(ok=ok or found is not None)

    async def _records(self) -> dict[str, bytes]:
        found = await self._node.get(self._nodes, latest=True)
        return {subkey: item.value for subkey, item in found.value.items()} if found else {}

    async def _confirm(self, data: bytes) -> channel.Confirmed:
        """Only another node's copy proves that the record left this computer."""
        peer = open_record(data, swarm=self._start.swarm, now=time.time()).peer_id
        protocol, key = self._node.protocol, key_of("nodes", self._start.swarm)
        nearest = protocol.routing_table.get_nearest_neighbors(
            key, k=_NUM_WITNESSES, exclude=self._node.node_id
        )
        answers = await asyncio.gather(*(protocol.call_find(who, [key]) for _, who in nearest))
        packed = protocol.serializer.dumps(data)
        num_holding = sum(_entry(answer, key, peer) == packed for answer in answers)
        return channel.Confirmed(num_asked=len(answers), num_holding=num_holding)

    async def keep_joined(self) -> None:
        """Ping neighbours, so that dead ones leave the table, and call on seeds that are none."""
        while True:
            neighbours = self._node.protocol.routing_table.uid_to_peer_id
            if neighbours:
                await self._node.protocol.call_ping(random.choice([*neighbours.values()]))  # noqa: S311
            due = self._seeds.due([str(p) for p in neighbours.values()], time.monotonic())
            await asyncio.gather(*map(self._call_on, due))
            is_settled = neighbours and not due
            pause_s = _PROBE_S if is_settled else _SEARCH_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311

    async def _call_on(self, address: str) -> None:
        answered = await self._join(address)
        self._seeds.called(
            address, answered=answered, is_alone=not self._num_neighbours, now=time.monotonic()
        )

    async def _join(self, address: str) -> bool:
        try:
            async with asyncio.timeout(self._start.dial_s):
                maddr = Multiaddr(address)
                peer = PeerID.from_base58(maddr["p2p"])
                if peer == self._node.peer_id:
                    return False
                await self._node.p2p._client.connect(peer, [maddr.decapsulate(f"/p2p/{peer}")])
                if await self._node.protocol.call_ping(peer) is None:
                    return False
                await self._node.find_nearest_nodes([self._node.node_id])
        except (*FAILURES, KeyError):
            return False
        return True


def _entry(answer: Any, key: Any, peer: str) -> bytes | None:
    """Return the packed value that another node holds for ``peer``."""
    found = answer[key][0] if answer else None
    item = found.value.get(peer) if found is not None else None
    return item.value if item is not None else None
