"""A DHT node without a validator: stores at others, and answers them, what it must not.

Reads from stdin ``{bootstrap, entries: [{key, subkey, value (hex or text), expires_at}]}`` and
prints for each entry what each other node said to it. Ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys

from node.sidecar.child.dht import DHTID, P2P, DHTNode, Multiaddr, PeerID


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    p2p = await P2P.create(nat_port_map=False)
    try:
        node = await DHTNode.create(p2p=p2p, node_id=DHTID.generate())
        for address in order["bootstrap"]:
            maddr = Multiaddr(address)
            peer = PeerID.from_base58(maddr["p2p"])
            await p2p._client.connect(peer, [maddr.decapsulate(f"/p2p/{peer}")])
            await node.protocol.call_ping(peer)
        while len(node.protocol.routing_table.uid_to_peer_id) < len(order["bootstrap"]):
            await asyncio.sleep(0.01)
        answers = [await attack(node, entry) for entry in order["entries"]]
        print(json.dumps(answers), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    finally:
        await p2p.shutdown()


async def attack(node: object, entry: dict[str, object]) -> list[bool]:
    """Keep the entry, to answer with it, and store it at every node known."""
    protocol = node.protocol
    key = DHTID.generate(source=entry["key"])
    value = bytes.fromhex(entry["value"])
    packed, expires_at = protocol.serializer.dumps(value), float(entry["expires_at"])
    protocol.storage.store(key, packed, expires_at, subkey=entry["subkey"])
    answers = []
    for peer in list(protocol.routing_table.uid_to_peer_id.values()):
        said = await protocol.call_store(peer, [key], [packed], expires_at, [entry["subkey"]])
        answers += list(said)
    return answers


asyncio.run(main())
