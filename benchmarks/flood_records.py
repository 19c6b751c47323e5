"""A hostile DHT node for the flood benchmark: stores valid records of nodes that do not exist.

    flood_records.py SEED SWARM SECONDS

SEED is the address of the victim's side-car. Prints "ready" when it begins, then one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time

from node.sidecar.child.dht import DHTID, P2P, DHTNode, Multiaddr, PeerID
from protocol.keys import NodeKey
from protocol.records import NodeRecord, sign


async def records(seed: str, swarm: str, seconds: float) -> int:
    """Valid records of nodes that do not exist, stored at the victim's side-car."""
    p2p = await P2P.create(nat_port_map=False)
    node = await DHTNode.create(p2p=p2p, node_id=DHTID.generate())
    maddr = Multiaddr(seed)
    victim = PeerID.from_base58(maddr["p2p"])
    await p2p._client.connect(victim, [maddr.decapsulate(f"/p2p/{victim}")])
    await node.protocol.call_ping(victim)
    print("ready", flush=True)
    num_taken = 0
    nodes_key, end = DHTID.generate(source=f"shoal/{swarm}/nodes"), time.monotonic() + seconds
    while time.monotonic() < end:
        made = [_record(swarm) for _ in range(50)]
        packed = [node.protocol.serializer.dumps(data) for _, data in made]
        expiries = [record.expires_at for record, _ in made]
        subkeys = [record.peer_id for record, _ in made]
        taken = await node.protocol.call_store(
            victim, [nodes_key] * len(made), packed, expiries, subkeys
        )
        num_taken += sum(bool(t) for t in taken or ())
    await p2p.shutdown()
    return num_taken


def _record(swarm: str) -> tuple[NodeRecord, bytes]:
    key = NodeKey(secrets.token_bytes(32))
    made = NodeRecord(
        swarm=swarm, peer_id=key.peer_id, sidecar_id=key.peer_id, stage=1,
        addresses=tuple(f"/ip4/127.0.0.1/tcp/{n}/p2p/{key.peer_id}" for n in range(1, 17)),
        sequence=1, expires_at=time.time() + 500, protocol_version=1,
    )  # fmt: skip
    return made, sign(made, key)


def main() -> None:
    """Do as the arguments say."""
    seed, swarm, seconds = sys.argv[1:]
    amount = asyncio.run(records(seed, swarm, float(seconds)))
    print(json.dumps({"amount": amount, "sessions": 1, "cut_after_s": None}), flush=True)


if __name__ == "__main__":
    main()
