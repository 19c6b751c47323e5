"""Nodes that read and write records on a board, each by the rules of ``protocol.joining``."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from protocol.joining import Newcomer, Seeking, Standing
from protocol.keys import PeerId

WALL_S = 1.8e9
LEASE_S = 30.0


def holder(name: str, stage: int, capacity: int = 3, **more: object) -> Standing:
    return Standing(PeerId(name), stage, capacity, **more)


def swarm_of(*replicas: int, demand: int = 1000, capacity: int = 3) -> list[Standing]:
    """One data node, and so many holders of stage 1, of stage 2 and so on."""
    nodes = [holder("data", 0, demand)]
    for stage, count in enumerate(replicas, 1):
        nodes += [holder(f"h{stage}-{n}", stage, capacity) for n in range(count)]
    return nodes


def counts(nodes: Sequence[Standing], num_stages: int) -> list[int]:
    return [sum(node.stage == stage for node in nodes) for stage in range(1, num_stages + 1)]


@dataclass
class Board:
    """A registry in which a record is seen ``late_s`` after it was written."""

    late_s: float = 0.0
    written: dict[PeerId, list[tuple[float, Standing]]] = field(default_factory=dict)

    def write(self, node: Standing, now: float) -> None:
        self.written.setdefault(node.peer, []).append((now + self.late_s, node))

    def read(self, me: PeerId, now: float) -> list[Standing]:
        seen = (
            [node for at, node in versions if at <= now][-1:]
            for peer, versions in self.written.items()
            if peer != me
        )
        return [node for newest in seen for node in newest if not _is_over(node, now)]


def _is_over(node: Standing, now: float) -> bool:
    return node.stage == -1 and node.claim is not None and node.claim.expires_at <= WALL_S + now


def play(agents: Sequence[tuple[float, Callable[[float], float | None]]]) -> float:
    """Run agents in the order of time; each says after how long it acts again, None for never."""
    queue = [(at, number) for number, (at, _) in enumerate(agents)]
    heapq.heapify(queue)
    now = 0.0
    while queue:
        now, number = heapq.heappop(queue)
        pause_s = agents[number][1](now)
        if pause_s is not None:
            heapq.heappush(queue, (now + pause_s, number))
    return now


def seeker(
    board: Board, name: str, num_stages: int, rng: Random, *, capacity: int = 3
) -> Callable[[float], float | None]:
    """A newcomer as an agent: claims, waits one to two ticks of a second, looks again."""
    peer = PeerId(name)
    newcomer = Newcomer(peer, dict.fromkeys(range(1, num_stages + 1), capacity))
    seeking = Seeking(newcomer, num_stages, LEASE_S)

    def act(now: float) -> float | None:
        stage = seeking.look(board.read(peer, now), WALL_S + now)
        if stage is not None:
            board.write(Standing(peer, stage, capacity), now)
            return None
        board.write(Standing(peer, -1, capacity, claim=seeking.claim), now)
        return rng.uniform(1.0, 2.0)

    return act
