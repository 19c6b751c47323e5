"""Faults at named points of the step, and random scripts of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Literal, get_args

import trio

from protocol.simulation.host import VirtualHost

NodeAction = Literal["kill", "freeze", "slow", "duplicate", "delay", "partition"]
SwarmAction = Literal["cut_all", "stop_all"]
Action = NodeAction | SwarmAction
ACTIONS: tuple[NodeAction, ...] = get_args(NodeAction)

POINTS: tuple[str, ...] = (
    "before_step",
    "after_forward", "after_input_gradient", "after_commit", "before_close", "in_reconcile",
    "in_reduce", "after_prepared", "before_apply", "after_apply", "in_state_transfer",
)  # fmt: skip
# Points that random scripts leave to the tests of the repair that they belong to.
PATH_POINTS: tuple[str, ...] = ("before_backward", "in_rebuild")


@dataclass(frozen=True, slots=True)
class Fault:
    """What befalls ``node`` when it passes ``point`` of ``step`` for the ``occurrence``-th time.

    With ``point`` None it happens at virtual time ``at_s``. ``amount`` is the factor of "slow" and
    the seconds of "delay". "partition" cuts ``node`` and ``allies`` off from everybody else, in the
    direction away from them only if ``is_one_way``. A killed node comes back without its state
    ``replace_after_s`` later, as the same node or, if ``is_stranger``, under a new key.

    "cut_all" takes the power from every node at once, "stop_all" asks all to leave and stops after
    ``duration_s`` who has not. They come back one by one from ``replace_after_s`` on.
    """

    action: Action
    node: int
    point: str | None = None
    step: int = 0
    occurrence: int = 1
    at_s: float = 0.0
    duration_s: float = 1.0
    amount: float = 1.0
    allies: tuple[int, ...] = ()
    is_one_way: bool = False
    replace_after_s: float | None = None
    is_stranger: bool = False


@dataclass
class FaultInjector:
    """Carries out a script: ``strike`` does to the world what a fault says."""

    script: Sequence[Fault]
    strike: Callable[[Fault], None]
    passes: dict[tuple[int, str, int], int] = field(default_factory=dict)
    struck: list[Fault] = field(default_factory=list)

    def timed(self) -> Iterable[Fault]:
        """Return the faults that wait for a time and not for a point."""
        return (fault for fault in self.script if fault.point is None)

    def fire(self, fault: Fault) -> None:
        """Let a fault happen now."""
        self.struck.append(fault)
        self.strike(fault)

    def due(self, node: int, point: str, step: int) -> list[Fault]:
        """Count a pass of a point; return the faults that wait for just this one."""
        place = node, point, step
        self.passes[place] = self.passes.get(place, 0) + 1
        return [
            fault
            for fault in self.script
            if (fault.node, fault.point, fault.step) == place
            and fault.occurrence == self.passes[place]
        ]


class SimulatedFaultPoints:
    """One node's FaultPoints port."""

    def __init__(self, node: int, host: VirtualHost, injector: FaultInjector) -> None:
        self._node, self._host, self._injector = node, host, injector

    async def reach(self, point: str, step: int) -> None:
        """Let what the script says happen here; a killed node does not return from it."""
        if point not in POINTS + PATH_POINTS:
            raise ValueError(f"{point} is not a fault point")
        for fault in self._injector.due(self._node, point, step):
            self._injector.fire(fault)
        if not self._host.is_alive:
            await trio.sleep_forever()
        await self._host.awake()


def random_script(
    rng: Random,
    num_nodes: int,
    num_steps: int,
    *,
    actions: Sequence[NodeAction] = ACTIONS,
    max_faults: int = 4,
    longest_s: float = 15.0,
) -> tuple[Fault, ...]:
    """Draw 1 to ``max_faults`` faults at points (one in five at a time instead)."""
    return tuple(
        _random_fault(rng, num_nodes, num_steps, rng.choice(actions), longest_s)
        for _ in range(rng.randint(1, max_faults))
    )


def _random_fault(
    rng: Random, num_nodes: int, num_steps: int, action: NodeAction, longest_s: float
) -> Fault:
    is_timed = rng.random() < 0.2
    allies = tuple(index for index in range(num_nodes) if rng.random() < 0.3)
    return Fault(
        action=action,
        node=rng.randrange(num_nodes),
        point=None if is_timed else rng.choice(POINTS),
        step=rng.randrange(num_steps),
        occurrence=1 if rng.random() < 0.8 else 2,
        at_s=rng.uniform(0, 6),
        duration_s=rng.uniform(0.1, longest_s),
        amount=rng.uniform(2, 20) if action == "slow" else rng.uniform(0.05, 2),
        allies=allies if action == "partition" and rng.random() < 0.5 else (),
        is_one_way=rng.random() < 0.3,
        replace_after_s=rng.uniform(0.1, longest_s) if rng.random() < 0.8 else None,
        is_stranger=rng.random() < 0.5,
    )
