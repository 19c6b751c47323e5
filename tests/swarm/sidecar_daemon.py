"""A daemon that is nothing but a side-car's supervisor, to be killed by test_sidecar."""

from __future__ import annotations

import json
import random
import sys

import psutil
import trio

from node.sidecar.supervisor import Sidecar, SidecarOptions
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey


class Silence:
    """An observer that looks away."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...

    def gauge(self, name: str, value: float, **labels: str) -> None: ...

    def event(self, name: str, **fields: object) -> None: ...


async def main() -> None:
    options = SidecarOptions("ab" * 32, listen=("/ip4/127.0.0.1/tcp/0",), maps_port=False)
    sidecar = Sidecar(NodeKey(b"\7" * 32), options, Deadlines(), Silence(), random.Random(0))
    async with trio.open_nursery() as nursery:
        await nursery.start(sidecar.run)
        process = psutil.Process(sidecar.pid)
        pids = [process.pid, *(child.pid for child in process.children(recursive=True))]
        print(json.dumps(pids), flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    sys.exit(trio.run(main))
