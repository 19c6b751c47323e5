"""A simulated computer: alive, frozen, slow or dead, and the network cards it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import trio

from protocol.keys import NodeKey, PeerId
from protocol.ports import JOB_PRIORITY, JobKind
from protocol.simulation.places import LAB, Place
from protocol.simulation.timeline import Timeline

FREE: Mapping[JobKind, float] = MappingProxyType(dict.fromkeys(JOB_PRIORITY, 0.0))


def simulation_key(index: int) -> NodeKey:
    """Return the key of the ``index``-th simulated node: the same in every run."""
    return NodeKey(index.to_bytes(32, "big"))


@dataclass(eq=False)
class VirtualHost:
    """One computer of the world; a replacement with the same key is another host.

    ``cost_s`` is the virtual time of each kind of job at speed 1.
    """

    name: str
    peer: PeerId
    timeline: Timeline
    place: Place = LAB
    cost_s: Mapping[JobKind, float] = field(default_factory=lambda: FREE)
    speed: float = 1.0
    extra_delay_s: float = 0.0
    is_duplicating: bool = False
    is_alive: bool = True
    frozen_since: float | None = None
    _frozen_until: float = 0.0
    _deferred: list[Callable[[], None]] = field(default_factory=list)
    _thawed: trio.Event = field(default_factory=trio.Event)
    on_freeze: Callable[[], None] = lambda: None
    on_death: Callable[[], None] = lambda: None

    @property
    def is_frozen(self) -> bool:
        """Whether the computer stands still; nothing of it runs and nothing answers."""
        return self.frozen_since is not None

    def freeze(self, duration_s: float) -> None:
        """Stand still for ``duration_s`` from now on, or longer if that was so already."""
        now = trio.current_time()
        self._frozen_until = max(self._frozen_until, now + duration_s)
        if not self.is_frozen:
            self.frozen_since = now
            self._thawed = trio.Event()
            self.on_freeze()
        self.timeline.at(self._frozen_until, self._thaw)

    def _thaw(self) -> None:
        if not self.is_frozen or trio.current_time() < self._frozen_until:
            return
        self.frozen_since = None
        self._thawed.set()
        # What waited in the kernel's buffers comes first, in the order of its arrival.
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            self.when_awake(action)

    def when_awake(self, action: Callable[[], None]) -> None:
        """Run ``action`` now, or after the thaw, or never if the computer is dead."""
        if self.is_frozen:
            self._deferred.append(action)
        elif self.is_alive:
            action()

    async def awake(self) -> None:
        """Return when the computer is not frozen: adapters pass here, so that nothing moves."""
        while self.is_frozen:
            await self._thawed.wait()

    def die(self) -> None:
        """Lose power: nothing of it runs any more, its sessions break."""
        if self.is_alive:
            self.is_alive = False
            self._deferred.clear()
            self.on_death()

    def slow_down(self, factor: float, duration_s: float) -> None:
        """Compute ``factor`` times slower for a while."""
        self.speed /= factor
        self.timeline.after(duration_s, lambda: self._change_speed(factor))

    def _change_speed(self, factor: float) -> None:
        self.speed *= factor

    def delay(self, extra_s: float, duration_s: float) -> None:
        """Send everything ``extra_s`` later for a while."""
        self.extra_delay_s += extra_s
        self.timeline.after(duration_s, lambda: self._change_delay(-extra_s))

    def _change_delay(self, by_s: float) -> None:
        self.extra_delay_s = max(0.0, self.extra_delay_s + by_s)

    def duplicate(self, duration_s: float) -> None:
        """Send every message twice for a while."""
        self.is_duplicating = True
        self.timeline.after(duration_s, self._stop_duplicating)

    def _stop_duplicating(self) -> None:
        self.is_duplicating = False
