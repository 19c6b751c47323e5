"""A holder of a stage with one of our averagers; takes orders on stdin, answers on stdout.

    averaging_ours.py KIND

KIND is "exact" (our exact sum over our data plane) or "hivemind" (hivemind's all-reduce behind our
agreement).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import trio
from ends import cpu_s, say
from sums import judged

from node.sidecar.averager import HivemindReducer, ReducerOptions
from node.transport import Libp2pNetwork
from protocol.averaging import AgreedAverager, Averager, ExactAverager, Round
from protocol.deadlines import Deadlines
from protocol.errors import AveragingFailed
from protocol.keys import NodeKey, PeerId
from protocol.ports import Envelope
from protocol.wire import Limits

MIB = 2**20
HOST = "/ip4/127.0.0.1/tcp/0"


class _Silent:
    """An Observer of nothing."""

    def count(self, name: str, amount: float = 1, **labels: str) -> None: ...
    def gauge(self, name: str, value: float, **labels: str) -> None: ...
    def event(self, name: str, **fields: object) -> None: ...


class Member:
    """One of our averagers on the real data plane."""

    def __init__(self, network: Libp2pNetwork, averager: Averager) -> None:
        self._network, self._averager = network, averager
        self._scope, self._awaited = trio.CancelScope(), set[str]()

    async def take_events(self) -> None:
        """Hand messages on; give a round up when a member of it is lost, as the authority does."""
        async for event in self._network.events:
            if isinstance(event, Envelope):
                with suppress(AveragingFailed):
                    self._averager.deliver(event)
            elif not event.is_up and event.peer in self._awaited:
                self._scope.cancel()

    async def take_part(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Average once with the members at the order's addresses."""
        peers = [PeerId(address.rpartition("/")[2]) for address in order["addresses"]]
        for peer, address in zip(peers, order["addresses"], strict=True):
            if peer != self._network.peer_id:
                self._network.introduce(peer, [address])
        values = torch.full((order["elements"],), float(order["value"]))
        round_ = Round(order["round"], 1, 0, 1, tuple(sorted(peers)))
        self._scope, self._awaited = trio.CancelScope(), set(peers)
        with self._scope:
            try:
                total, _ = await self._averager.total(round_, values, 1)
            except AveragingFailed as error:
                return {"result": "refused", "cause": str(error)}
            return judged(total, order["sum"])
        return {"result": "refused", "cause": "a session was lost"}


async def ours(kind: str) -> None:
    """Be a member that averages exactly, or by hivemind behind our agreement."""
    deadlines, observer = Deadlines(), _Silent()
    network = Libp2pNetwork(
        NodeKey(os.urandom(32)), "ab" * 32, limits=Limits(128 * MIB), observer=observer,
        deadlines=deadlines,
    )  # fmt: skip
    async with network.running([HOST]), trio.open_nursery() as nursery:
        averager: Averager = ExactAverager(network, deadlines)
        if kind == "hivemind":
            options = ReducerOptions(listen=(HOST,), maps_port=False)
            reducer = HivemindReducer(options, deadlines, observer, random.Random(0))
            nursery.start_soon(reducer.run)
            await reducer.ready()
            averager = AgreedAverager(network, deadlines, reducer, observer)
        member = Member(network, averager)
        nursery.start_soon(member.take_events)
        say({"address": network.addresses[0]})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            before, began = cpu_s(), time.perf_counter()
            answer = await member.take_part(json.loads(line))
            say({**answer, "s": time.perf_counter() - began, "cpu_s": cpu_s() - before})
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(ours, sys.argv[1])
