"""One holder of a stage for the averaging benchmark; takes orders on stdin, answers on stdout.

    averaging_ends.py KIND [ADDRESS OF THE FIRST]

KIND is "exact" (our exact sum over our data plane), "hivemind" (hivemind's all-reduce behind our
agreement) or "plain" (hivemind's DecentralizedAverager as it comes). Every member's values are a
constant of its own, so that a result tells what it is made of.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from ends import cpu_s, say

MIB = 2**20
HOST = "/ip4/127.0.0.1/tcp/0"
# hivemind's own limits are endless: a lost peer would hang everybody.
PLAIN_LIMITS = {"allreduce_timeout": 20, "sender_timeout": 3, "reducer_timeout": 6}
PLAIN_STEP_S = 30.0
TOLERANCE = 1e-6


class _Silent:
    """An Observer of nothing."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


def judged(result: torch.Tensor, expected: float) -> dict[str, Any]:
    """Whether a result is what all members' values make, in every place."""
    error = float((result - expected).abs().max()) / expected
    kinds = len(torch.unique(result[:: max(1, len(result) // 10**5)].round(decimals=3)))
    told = "right" if error < TOLERANCE else "mixture" if kinds > 1 else "of fewer members"
    return {"result": told, "error": error}


# --- our adapters ----------------------------------------------------------------------------


async def ours(kind: str) -> None:
    """An averager on the real data plane."""
    import trio

    from node.transport import Libp2pNetwork
    from protocol.averaging import ExactAverager, Round
    from protocol.deadlines import Deadlines
    from protocol.errors import AveragingFailed
    from protocol.keys import NodeKey
    from protocol.ports import Envelope
    from protocol.wire import Limits

    deadlines, observer = Deadlines(), _Silent()
    network = Libp2pNetwork(
        NodeKey(os.urandom(32)), "ab" * 32, limits=Limits(128 * MIB), observer=observer,
        deadlines=deadlines,
    )  # fmt: skip

    async def take_events() -> None:
        async for event in network.events:
            if isinstance(event, Envelope):
                with suppress(AveragingFailed):
                    averager.deliver(event)

    async def take_part(order: Mapping[str, Any]) -> dict[str, Any]:
        for address in order["addresses"]:
            peer = address.rpartition("/")[2]
            if peer != network.peer_id:
                network.introduce(peer, [address])
        members = sorted(address.rpartition("/")[2] for address in order["addresses"])
        values = torch.full((order["elements"],), float(order["value"]))
        try:
            round_ = Round(order["round"], 1, 0, 1, tuple(members))
            total, _ = await averager.total(round_, values, 1)
        except AveragingFailed as error:
            return {"result": "refused", "cause": str(error)}
        return judged(total, order["sum"])

    async with network.running([HOST]), trio.open_nursery() as nursery:
        if kind == "exact":
            averager: Any = ExactAverager(network, deadlines)
        else:
            from node.sidecar.averager import HivemindReducer, ReducerOptions
            from protocol.averaging import AgreedAverager

            options = ReducerOptions(listen=(HOST,), maps_port=False)
            reducer = HivemindReducer(options, deadlines, observer, random.Random(0))
            nursery.start_soon(reducer.run)
            await reducer.ready()
            averager = AgreedAverager(network, deadlines, reducer, observer)
        nursery.start_soon(take_events)
        say({"address": network.addresses[0]})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            before, began = cpu_s(), time.perf_counter()
            answer = await take_part(json.loads(line))
            say({**answer, "s": time.perf_counter() - began, "cpu_s": cpu_s() - before})
        nursery.cancel_scope.cancel()


# --- hivemind as it comes --------------------------------------------------------------------


def plain(first: str | None) -> None:
    """A DecentralizedAverager for each group and size."""
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager

    dht = DHT(start=True, initial_peers=[first] if first else None, host_maddrs=[HOST])
    averagers: dict[tuple[int, int], Any] = {}

    def averager_of(order: Mapping[str, Any]) -> Any:
        place = len(order["addresses"]), order["elements"]
        if place not in averagers:
            while averagers:
                averagers.popitem()[1].shutdown()
            averagers[place] = DecentralizedAverager(
                [torch.zeros(order["elements"])], dht, prefix="-".join(map(str, place)),
                target_group_size=place[0], min_matchmaking_time=3.0, start=True, **PLAIN_LIMITS,
            )  # fmt: skip
        return averagers[place]

    def take_part(order: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        averager = averager_of(order)
        with averager.get_tensors() as (values,):
            values.fill_(float(order["value"]))

        def run() -> dict[str, Any]:
            try:
                averager.step(timeout=PLAIN_STEP_S)
            except Exception as error:  # whatever it raises ends the round, not the benchmark
                return {"result": "refused", "cause": repr(error)}
            num_members = len(order["addresses"])
            with averager.get_tensors() as (values,):
                return judged(values * num_members, order["sum"])

        return run

    say({"address": str(dht.get_visible_maddrs()[0])})
    for line in sys.stdin:
        run = take_part(json.loads(line))
        before, began = cpu_s(), time.perf_counter()
        answer = run()
        say({**answer, "s": time.perf_counter() - began, "cpu_s": cpu_s() - before})
    for averager in averagers.values():
        averager.shutdown()
    dht.shutdown()


def main(kind: str, first: str = "") -> None:
    """Be one member until stdin ends."""
    if kind == "plain":
        plain(first or None)
    else:
        import trio

        trio.run(ours, kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
