"""A holder with hivemind's DecentralizedAverager as it comes; orders on stdin, answers on stdout.

averaging_plain.py [ADDRESS OF THE FIRST]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from ends import cpu_s, say
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from sums import judged

HOST = "/ip4/127.0.0.1/tcp/0"
# hivemind's own limits are endless: a lost peer would hang everybody.
LIMITS = {"allreduce_timeout": 20, "sender_timeout": 3, "reducer_timeout": 6}
STEP_S, MATCHMAKING_S, REQUEST_S = 30.0, 3.0, 1.0


class Averagers:
    """An averager for each group and size, one at a time."""

    def __init__(self, dht: DHT) -> None:
        self._dht = dht
        self._place: tuple[int, int] | None = None
        self._averager: Any = None

    def prepare(self, order: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
        """Fill in this member's values; return what takes part in the round."""
        num_members = len(order["addresses"])
        averager = self._for(num_members, order["elements"])
        with averager.get_tensors() as (values,):
            values.fill_(float(order["value"]))

        def take_part() -> dict[str, Any]:
            try:
                averager.step(timeout=STEP_S)
            except Exception as error:  # whatever it raises ends the round, not the benchmark
                return {"result": "refused", "cause": repr(error)}
            with averager.get_tensors() as (values,):
                return judged(values * num_members, order["sum"])

        return take_part

    def _for(self, num_members: int, num_elements: int) -> Any:
        place = num_members, num_elements
        if place != self._place:
            self.close()
            self._place = place
            self._averager = DecentralizedAverager(
                [torch.zeros(num_elements)], self._dht, prefix="-".join(map(str, place)),
                target_group_size=num_members, min_matchmaking_time=MATCHMAKING_S,
                request_timeout=REQUEST_S, start=True,
                **LIMITS,
            )  # fmt: skip
        return self._averager

    def close(self) -> None:
        """End the averager, if there is one."""
        if self._averager is not None:
            self._averager.shutdown()


def main(first: str = "") -> None:
    """Be a member until stdin ends."""
    dht = DHT(start=True, initial_peers=[first] if first else None, host_maddrs=[HOST])
    averagers = Averagers(dht)
    say({"address": str(dht.get_visible_maddrs()[0])})
    for line in sys.stdin:
        take_part = averagers.prepare(json.loads(line))
        before, began = cpu_s(), time.perf_counter()
        answer = take_part()
        say({**answer, "s": time.perf_counter() - began, "cpu_s": cpu_s() - before})
    averagers.close()
    dht.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
