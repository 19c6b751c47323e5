"""A data node and two holders of each of two stages, over the simulated network."""

from __future__ import annotations

from random import Random

import torch
import trio
from core_kit import LIMITS, NoPoints, router_of
from step_kit import KEYS, PEERS, decision_of, manifest_of

from protocol.averaging import ExactAverager
from protocol.core.beginning import Beginning
from protocol.core.context import Context
from protocol.core.journal import MemoryJournal
from protocol.core.postbox import Postbox
from protocol.core.sessions import Sessions
from protocol.core.settings import NodeSettings
from protocol.manifest import Manifest
from protocol.messages import Decision, Message, StateChunk
from protocol.ports import Envelope
from protocol.simulation.adapter import address_of
from protocol.simulation.host import VirtualHost
from protocol.simulation.network import VirtualNetwork
from protocol.simulation.places import Link, uniform
from protocol.simulation.runner import VirtualRunner
from protocol.simulation.timeline import Timeline
from protocol.simulation.toy_stage import toy_stage
from protocol.simulation.trace import Trace, TracingObserver

DATA, B1, B2, C1, C2 = PEERS[:5]
ROSTER = ((DATA,), (B1, B2), (C1, C2))
ROOM_BYTES = 10_000
CONTEXT = 8


class Machine:
    """One node of the world: its stage, and its sessions."""

    def __init__(self, world: World, index: int, stage: int) -> None:
        key = KEYS[index]
        self.world = world
        self.host = VirtualHost(f"n{index}", key.peer_id, world.timeline)
        self.network = world.network.attach(self.host)
        self.observer = TracingObserver(self.host.name, world.trace)
        self.ctx = Context(
            key=key, manifest=world.manifest, swarm=world.manifest.swarm_id, network=self.network,
            runner=VirtualRunner(self.host), router=router_of(self.network),
            averager=ExactAverager(self.network, LIMITS), deadlines=LIMITS,
            observer=self.observer, faults=NoPoints(), journal=MemoryJournal(), rng=Random(index),
            stage=stage, state=toy_stage(world.manifest, stage), capacity=4,
            loopback=lambda _: None,
        )  # fmt: skip
        self.postbox = Postbox(self.network, self.observer)
        settings = NodeSettings(deadlines=LIMITS, session_bytes=ROOM_BYTES)
        first = Beginning(world.manifest, self.network, None, LIMITS, self.observer)
        self.sessions = Sessions(
            lambda: self.ctx, lambda: world.decision, settings, self.observer, self.postbox.post,
            first,
        )  # fmt: skip
        self.heard: list[Message] = []
        self.alive = trio.CancelScope()

    async def live(self) -> None:
        with self.alive:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.network.run)
                nursery.start_soon(self.postbox.run)
                nursery.start_soon(self.sessions.run)
                async for item in self.network.events:
                    self.take(item)

    def take(self, item: object) -> None:
        if not isinstance(item, Envelope):
            self.sessions.on_change(item)
            return
        self.heard.append(item.message)
        if isinstance(item.message, StateChunk):
            self.sessions.takes_chunk(item)
        else:
            self.sessions.on_envelope(item)

    def die(self) -> None:
        self.host.die()
        self.alive.cancel()

    def train(self) -> None:
        state = self.ctx.state
        state.prepare(torch.ones(state.num_gradients), 4)
        state.apply()


class World:
    """The nodes at step 1 of a swarm with a context of 8."""

    def __init__(self, nursery: trio.Nursery, **settings: object) -> None:
        plain = manifest_of()
        model = plain.model.model_copy(update={"context": CONTEXT})
        self.manifest: Manifest = plain.model_copy(update={"model": model, **settings})
        self.timeline, self.trace = Timeline(), Trace()
        self.network = VirtualNetwork(
            self.timeline, self.trace, rng=Random(0), profile=uniform(Link(0.01)), deadlines=LIMITS
        )
        nursery.start_soon(self.timeline.run)
        self.decision: Decision | None = None
        stages = [k for k, peers in enumerate(ROSTER) for _ in peers]
        machines = [Machine(self, index, stage) for index, stage in enumerate(stages)]
        self.data, self.b1, self.b2, self.c1, self.c2 = self.machines = machines
        for machine in machines:
            nursery.start_soon(machine.live)
            for peer in PEERS[: len(machines)]:
                machine.network.introduce(peer, [address_of(peer)])
        self.train()

    @property
    def holders(self) -> list[Machine]:
        return self.machines[1:]

    def train(self) -> None:
        """Take everybody who lives to the next step."""
        for machine in self.machines:
            machine.train()
        self.decide()

    def decide(self, roster: tuple[tuple[str, ...], ...] = ROSTER) -> None:
        """The step at which the data node is begins."""
        states = [self.data.ctx.state, self.b1.ctx.state, self.c1.ctx.state]
        digests = tuple(state.digest for state in states)
        self.decision = decision_of(roster, step=states[0].step, digests=digests)

    @property
    def num_kept(self) -> list[int]:
        """Sessions at each holder."""
        return [len(machine.sessions.kept) for machine in self.holders]

    def expected(self, tokens: list[int], num_new: int) -> list[int]:
        """What one computer writes."""
        edge, blocks = self.data.ctx.edge, (self.b1.ctx.blocks, self.c1.ctx.blocks)
        edge_pin = edge.pin(edge.step, is_whole=False)
        for _ in range(num_new):
            h_BTW = edge.embed_tokens(edge_pin, torch.tensor([tokens]))
            for block in blocks:
                cache = block.open_cache(block.pin(block.step, is_whole=False), len(tokens))
                h_BTW = block.extend(cache, h_BTW)
            tokens = [*tokens, int(edge.logits(edge_pin, h_BTW).argmax())]
        return tokens
