"""Holders of stage 1 over the simulated network, for the tests of state transfer."""

from __future__ import annotations

from random import Random

import torch
import trio
from core_kit import LIMITS, NoPoints, router_of
from step_kit import KEYS, PEERS, SWARM, decision_of, manifest_of

from protocol.averaging import ExactAverager
from protocol.core.context import Context
from protocol.core.journal import MemoryJournal
from protocol.core.transfer import Donor, Joiner
from protocol.messages import Decision, FetchState, StateChunk
from protocol.ports import Envelope
from protocol.simulation.adapter import address_of
from protocol.simulation.host import VirtualHost, simulation_key
from protocol.simulation.network import VirtualNetwork
from protocol.simulation.places import Link, uniform
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.timeline import Timeline
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.trace import Trace, TracingObserver

ME, ONE, TWO = PEERS[1:4]
CHUNK_BYTES = 20  # the toy state takes a handful of them


class Computer:
    """A holder of stage 1 that serves its state, and fetches one if it is told to."""

    def __init__(self, world: World, index: int) -> None:
        key = KEYS[index] if index < len(KEYS) else simulation_key(index)
        self.host = VirtualHost(f"n{index}", key.peer_id, world.timeline)
        self.network = world.network.attach(self.host)
        self.observer = TracingObserver(self.host.name, world.trace)
        self.ctx = Context(
            key=key, manifest=world.manifest, swarm=SWARM, network=self.network,
            runner=VirtualRunner(self.host), router=router_of(self.network),
            averager=ExactAverager(self.network, LIMITS), deadlines=LIMITS,
            observer=self.observer, faults=NoPoints(), journal=MemoryJournal(), rng=Random(index),
            stage=1, state=toy_stage(world.manifest, 1), capacity=4, loopback=lambda _: None,
        )  # fmt: skip
        self.donor, self.joiner = Donor(self.ctx), Joiner(self.ctx)
        self.asked: list[int] = []
        self.before_serving = lambda: None
        self.alive = trio.CancelScope()

    async def live(self) -> None:
        with self.alive:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.network.run)
                async for item in self.network.events:
                    if isinstance(item, Envelope):
                        nursery.start_soon(self.serve, item)

    async def serve(self, envelope: Envelope) -> None:
        if isinstance(envelope.message, FetchState):
            self.asked.append(envelope.message.chunk)
            self.before_serving()
            await self.donor.serve(envelope.message, envelope.sender)
        elif isinstance(envelope.message, StateChunk):
            self.joiner.deliver(envelope)

    def die(self) -> None:
        self.host.die()
        self.alive.cancel()

    def train(self) -> None:
        """Move to step 1."""
        state = self.ctx.state
        state.prepare(torch.ones(state.num_gradients), 4)
        state.apply()


class World:
    """Two donors at step 1 and a joiner at step 0."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.manifest = manifest_of()
        self.timeline, self.trace = Timeline(), Trace()
        self.network = VirtualNetwork(
            self.timeline, self.trace, rng=Random(0), profile=uniform(Link(0.01)), deadlines=LIMITS
        )
        nursery.start_soon(self.timeline.run)
        self.me, self.one, self.two = (Computer(self, index) for index in (1, 2, 3))
        for computer in (self.me, self.one, self.two):
            nursery.start_soon(computer.live)
            for peer in (ME, ONE, TWO):
                computer.network.introduce(peer, [address_of(peer)])
        self.one.train()
        self.two.train()

    @property
    def first(self) -> Computer:
        """The donor that the joiner asks first."""
        donors = [ONE, TWO]
        Random(1).shuffle(donors)
        return self.one if donors[0] == ONE else self.two

    @property
    def second(self) -> Computer:
        return self.two if self.first is self.one else self.one

    def decision(self, **changes: object) -> Decision:
        digests = ("0" * 64, self.one.ctx.state.digest, "2" * 64)
        roster = [PEERS[:1], (ONE, TWO), PEERS[4:5]]
        fields = {"digests": digests} | changes
        return decision_of(fields.pop("roster", roster), step=1, term=2, **fields)


def lie(donor: Computer, *, chunk: int = 1) -> None:
    """Give one chunk other bytes, under the right name."""
    honest = donor.donor._chunk
    donor.donor._chunk = lambda n: torch.zeros_like(honest(n)) if n == chunk else honest(n)
