"""The coroutine of this node's flow router: it ticks, hands messages in, and posts what comes out.

The rules are ``routing.flow_node`` (which flows there are) and ``routing.flow_router`` (what a
microbatch makes of them). Only members of the decided roster are listened to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import trio

from protocol.core.context import NodePorts
from protocol.core.settings import NodeSettings
from protocol.core.signal import Signal
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import Decision, Message
from protocol.ports import Observer, PeerChange, Runner
from protocol.routing import FlowRouter, MeasuredCosts, Send

Post = Callable[[tuple[PeerId, ...], Message], None]


class Routing:
    """Owns the router of a node. ``cpu_clock`` counts what routing costs."""

    def __init__(
        self,
        router: FlowRouter,
        post: Post,
        observer: Observer,
        cpu_clock: Callable[[], float],
    ) -> None:
        self.router = router
        self._post, self._observer, self._cpu_clock = post, observer, cpu_clock
        self._told: Counter[str] = Counter()
        self._changed_at: float | None = None
        self._decision: Decision | None = None
        self._window = 0
        self.window_changed = Signal()

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await trio.sleep(self.router.settings.tick_s)
            self._act(self.router.tick)
            self._measure()
            self._look_at_window()

    def serve(self, stage: int, num_stages: int, capacity: int) -> None:
        """This node has a stage now."""
        self._act(lambda now: self.router.serve(stage, num_stages, capacity, now))

    def on_decision(self, decision: Decision) -> None:
        """A new roster."""
        self._decision = decision
        self._act(lambda now: self.router.on_decision(decision, now))
        self._look_at_window()

    def on_message(self, message: Message, sender: PeerId) -> None:
        """Another node's router says something."""
        self._act(lambda now: self.router.handle(sender, message, now))

    def on_change(self, change: PeerChange) -> None:
        """A session came up or went down: flows go round who is gone."""
        self._act(lambda now: self.router.on_session(change.peer, change.is_up, now))

    def drain(self) -> None:
        """Hand the flows over before leaving."""
        self._act(self.router.drain)

    def _act(self, act: Callable[[float], Iterable[Send]]) -> None:
        began = self._cpu_clock()
        sends = list(act(trio.current_time()))
        self._observer.count("seconds", self._cpu_clock() - began, phase="routing")
        for send in sends:
            self._post((send.peer,), send.message)

    def _look_at_window(self) -> None:
        """A data node that waits for a place looks again when there may be more of them."""
        if self._decision is not None:
            window = self.router.window(self._decision, trio.current_time())
            if window != self._window:
                self._window = window
                self.window_changed.notify()

    def _measure(self) -> None:
        router, report = self.router, self.router.report
        self._observer.gauge("flows", len(report.inflows), direction="in")
        self._observer.gauge("flows", len(report.outflows), direction="out")
        self._observer.gauge("flows_wanted", router.demand)
        self._observer.gauge("flow_cost_seconds", report.cost_s or 0.0)
        for choice, num in (("flow", router.num_by_flow), ("beside", router.num_beside)):
            self._observer.count("hops", num - self._told[choice], choice=choice)
            self._told[choice] = num
        changed_at = report.last_change[0] if report.last_change else None
        if changed_at != self._changed_at:
            self._observer.count("reroutings")
            self._changed_at = changed_at


def routing_of(
    me: PeerId,
    manifest: Manifest,
    ports: NodePorts,
    settings: NodeSettings,
    post: Post,
    room_of: Callable[[PeerId], int | None],
) -> Routing:
    """The router of a node: costs are what its ports measure, ``room_of`` what holders say."""
    costs = MeasuredCosts(
        boundary_bytes(manifest), ports.network.rtt_s, ports.network.bandwidths,
        lambda: _means_s(ports.runner),
    )  # fmt: skip
    router = FlowRouter(
        me, costs=costs, rtt_s=ports.network.rtt_s, rng=ports.rng, settings=settings.routing,
        room_of=room_of,
    )  # fmt: skip
    return Routing(router, post, ports.observer, settings.cpu_clock)


def boundary_bytes(manifest: Manifest) -> int:
    """The size of an activation or gradient between two stages, on the wire."""
    itemsize = 4 if manifest.pipeline.wire_dtype == "float32" else 2
    num_tokens = manifest.training.microbatch * manifest.model.context
    return num_tokens * manifest.model.width * itemsize


def _means_s(runner: Runner) -> tuple[float | None, float | None]:
    """Of the forward and the backward pass; a data node embeds and computes the loss instead."""
    forward_s, backward_s = runner.mean_s("forward"), runner.mean_s("backward")
    return forward_s or runner.mean_s("embed"), backward_s or runner.mean_s("edge")
