"""Whether nodes that start at the same moment, or all start again, become one swarm.

    python benchmarks/simultaneous_start.py --rounds 50 --write
    python benchmarks/simultaneous_start.py --rounds 1 --json

Each node is a side-car (a process with its p2pd, as in the daemon) and the daemon's discovery; the
rest of the daemon takes no part in it. Everybody knows the same three seeds, which start with the
others. Found means that everybody has read the record that each of the others published in its
present life. In every round:

- together: all start at once; no seed is up before the others.
- restarted: all are killed and start at once again, on new ports but for the first seed, whose
  invite is what they have besides the peers that each remembered.
- one by one: one after the other, the seeds too, starts again on a new port.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from node.sidecar.registry import SidecarRegistry
from node.sidecar.supervisor import Sidecar, SidecarOptions
from protocol.core.discovery import Discovery
from protocol.core.settings import NodeSettings
from protocol.deadlines import Deadlines
from protocol.keys import NodeKey, PeerId
from protocol.manifest import DataSpec, Manifest, ModelSpec, PipelineSpec, TrainingSpec

NUM_NODES, NUM_SEEDS = 8, 3
DEADLINES = Deadlines()
LIMIT_S = 2 * DEADLINES.record_lifetime_s
PHASES = ("together", "restarted", "one by one")
KEYS = [NodeKey(bytes([k + 1]) * 32) for k in range(NUM_NODES)]
MANIFEST = Manifest(
    name="start",
    organiser=KEYS[0].peer_id,
    model=ModelSpec(
        layers=3, width=32, heads=2, kv_heads=1, feed_forward=64, vocabulary=257, context=32
    ),
    pipeline=PipelineSpec(stages=3),
    training=TrainingSpec(steps=10, quota=4, microbatch=2),
    data=DataSpec(),
)
RESULTS = Path(__file__).parent / "results"


class Silence:
    """An observer that looks away, and a network that nobody is introduced to."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...

    def gauge(self, name: str, value: float, **labels: str) -> None: ...

    def event(self, name: str, **fields: object) -> None: ...

    def introduce(self, peer: PeerId, addresses: Sequence[str]) -> None: ...


class Life:
    """A node from one start to its end."""

    def __init__(self, node: Node, number: int, port: int, seeds: tuple[str, ...]) -> None:
        self.address = f"/ip4/127.0.0.1/tcp/{number + 1}"
        options = SidecarOptions(
            MANIFEST.swarm_id,
            listen=(f"/ip4/127.0.0.1/tcp/{port}",),
            bootstrap=seeds,
            maps_port=False,
            peer_cache=node.cache,
        )
        silence, rng = Silence(), random.Random()
        self.sidecar = Sidecar(node.key, options, DEADLINES, silence, rng)
        self.discovery = Discovery(
            node.key,
            MANIFEST,
            silence,
            SidecarRegistry(self.sidecar, node.key, MANIFEST.swarm_id),
            silence,
            NodeSettings(
                deadlines=DEADLINES, addresses=lambda: (self.address,), wall_clock=time.time
            ),
        )
        self.scope, self.ended = trio.CancelScope(), trio.Event()

    async def run(self) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.sidecar.run)
                await self.discovery.run()
        self.ended.set()

    async def end(self) -> None:
        """End it as SIGKILL would: the side-car is told nothing."""
        self.scope.cancel()
        await self.ended.wait()


@dataclass
class Node:
    """A key, a file of remembered peers, and the present life."""

    index: int
    folder: Path
    num_lives: int = 0
    life: Life | None = None

    @property
    def key(self) -> NodeKey:
        return KEYS[self.index]

    @property
    def cache(self) -> Path:
        return self.folder / f"peers-{self.index}.json"


@dataclass
class Round:
    """Eight nodes and the times in which they found each other; infinite if they did not."""

    folder: Path
    nursery: trio.Nursery
    nodes: list[Node] = field(default_factory=list)
    found_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [Node(index, self.folder) for index in range(NUM_NODES)]
        self.ports = free_ports(NUM_SEEDS)
        self.seeds = tuple(
            f"/ip4/127.0.0.1/tcp/{port}/p2p/{KEYS[k].derive('sidecar').peer_id}"
            for k, port in enumerate(self.ports)
        )

    def start(self, node: Node, port: int = 0) -> None:
        node.life = Life(node, node.num_lives, port, self.seeds)
        node.num_lives += 1
        self.nursery.start_soon(node.life.run)

    async def together(self) -> None:
        for node, port in zip(self.nodes, [*self.ports, *[0] * NUM_NODES], strict=False):
            self.start(node, port)
        await self.expect("together")

    async def restarted(self) -> None:
        await self.end_all()
        for node in self.nodes:
            self.start(node, self.ports[0] if node.index == 0 else 0)
        await self.expect("restarted")

    async def one_by_one(self) -> None:
        for node in self.nodes:
            await trio.sleep(2 * DEADLINES.sidecar_probe_s)  # who lived less remembers nobody
            assert node.life is not None
            await node.life.end()
            self.start(node)
        await self.expect("one by one")

    async def expect(self, phase: str) -> None:
        began = trio.current_time()
        self.found_s[phase] = float("inf")
        with trio.move_on_after(LIMIT_S):
            while not all(self.knows_all(node) for node in self.nodes):
                await trio.sleep(0.1)
            self.found_s[phase] = trio.current_time() - began

    def knows_all(self, node: Node) -> bool:
        assert node.life is not None
        known = node.life.discovery.known
        return all(
            other.life is not None
            and other.key.peer_id in known
            and known[other.key.peer_id].addresses == (other.life.address,)
            for other in self.nodes
            if other is not node
        )

    async def end_all(self) -> None:
        for node in self.nodes:
            if node.life is not None:
                await node.life.end()


def free_ports(count: int) -> list[int]:
    """Ports that nobody holds at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


async def play(phases: Sequence[str]) -> dict[str, float]:
    """One round, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="shoal-start-"))
    try:
        async with trio.open_nursery() as nursery:
            one = Round(folder, nursery)
            parts: dict[str, Callable] = dict(
                zip(PHASES, (one.together, one.restarted, one.one_by_one), strict=True)
            )
            for phase in phases:
                await parts[phase]()
            await one.end_all()
        return one.found_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def summary(rounds: Sequence[dict[str, float]], phase: str) -> dict[str, float | int]:
    """How often everybody was found, and how fast."""
    times = [found[phase] for found in rounds if phase in found]
    found = [t for t in times if t < float("inf")]
    return {
        "rounds": len(times),
        "one_swarm": len(found),
        "median_s": round(statistics.median(found), 1) if found else -1,
        "longest_s": round(max(found), 1) if found else -1,
    }


def table(rounds: Sequence[dict[str, float]]) -> str:
    """The result in Markdown."""
    lines = [
        "# Simultaneous start",
        "",
        "Written by `python benchmarks/simultaneous_start.py --rounds 50 --phases all --write`, or",
        "in parts that share a `--log`: the second column says how often each start was played.",
        f"{NUM_NODES} side-cars, {NUM_SEEDS} of them seeds, have {LIMIT_S:.0f} s, two lifetimes of",
        "a record, to become one swarm.",
        "",
        "| start | rounds | one swarm | median s | longest s |",
        "|---|---|---|---|---|",
    ]
    for phase in PHASES:
        s = summary(rounds, phase)
        if s["rounds"]:
            lines.append(f"| {phase} | {' | '.join(str(value) for value in s.values())} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--phases", default="together", help="comma-separated, or all")
    parser.add_argument("--log", type=Path, help="append each round's times, and count those there")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"the table, to {RESULTS.name}/")
    options = parser.parse_args()
    phases = PHASES if options.phases == "all" else tuple(options.phases.split(","))
    rounds = []
    if options.log and options.log.exists():
        rounds = [json.loads(line) for line in options.log.read_text().splitlines()]
    for number in range(options.rounds):
        rounds.append(trio.run(play, phases))
        print(f"round {number + 1}: {rounds[-1]}", file=sys.stderr, flush=True)
        if options.log:
            with options.log.open("a") as file:
                file.write(json.dumps(rounds[-1]) + "\n")
    if options.json:
        print(json.dumps({phase: summary(rounds, phase) for phase in PHASES}))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "simultaneous_start.md").write_text(table(rounds))
    return 0 if all(t < float("inf") for found in rounds for t in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
