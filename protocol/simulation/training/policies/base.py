"""What a policy decides, and what it may know."""

from __future__ import annotations

from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Protocol

from protocol.simulation.training.joining import stage_for
from protocol.simulation.training.microbatch import Microbatch

if TYPE_CHECKING:
    from protocol.simulation.training.agenda import Agenda
    from protocol.simulation.training.fleet import Fleet


class Recovery(Enum):
    """How a microbatch survives a holder that dies while its gradient is on the way back."""

    PATH = "path"  # the neighbours give another holder what they keep; it computes its stage
    DATA_NODE = "data node"  # the same, but the data node sends input and gradient
    RESTART = "restart"  # everything of this microbatch is computed again


class World(Protocol):
    """What a policy sees. Room and membership are true and known at once to everybody who asks.

    Crashed nodes count as holders until they are noticed.
    """

    agenda: Agenda
    fleet: Fleet
    rng: Random

    @property
    def num_stages(self) -> int:
        """The number of stages that holders serve."""
        ...

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the holders of a stage that nobody knows to be dead, in order."""
        ...

    def room(self, node: int) -> int:
        """Return how many more microbatches a holder could take; negative if some wait there."""
        ...

    def stage_of(self, node: int) -> int:
        """Return the stage that a node serves."""
        ...

    def is_alive(self, node: int) -> bool:
        """Whether a node lives: for the mechanics of a policy's messages, not for its choices."""
        ...

    def in_flight(self, data_node: int) -> int:
        """Return how many microbatches of a data node are under way."""
        ...

    def issue(self) -> None:
        """Let the data nodes start what the policy allows now."""
        ...

    def count_message(self) -> None:
        """Note that a small message was sent."""
        ...


class Policy:
    """A router: which holder a microbatch goes to, and which stage a newcomer serves.

    The default is to keep as many microbatches of each data node in flight as it has demand.
    """

    name = ""
    recovery = Recovery.PATH
    refuses = False  # whether a holder without room sends an activation back, or lets it wait there

    def attach(self, world: World, stages: dict[int, int]) -> dict[int, int]:
        """See the world, and the stages that nodes have; return those that they shall have."""
        self.world = world
        return stages

    def prepare_s(self) -> float:
        """Return how long this policy needs before the first step."""
        return 0.0

    def opens(self) -> None:
        """A step opens; newcomers have joined."""

    def opening_s(self) -> float:
        """Return how long it needs before work begins on a step that opens now."""
        return 0.0

    def may_start(self, data_node: int) -> bool:
        """Whether a data node may begin another microbatch now."""
        demand = self.world.fleet.network.demands[data_node]
        return self.world.in_flight(data_node) < demand

    def started(self, microbatch: Microbatch) -> None:
        """A microbatch begins: plan its path, if the policy plans paths."""

    def next_hop(self, microbatch: Microbatch, stage: int) -> int | None:
        """Return the holder of ``stage`` that a microbatch goes to, or None to ask again later."""
        raise AssertionError(f"{self.name} chooses nobody for microbatch {microbatch.number}")

    def replacement(self, microbatch: Microbatch, stage: int) -> int:
        """Return the holder that computes ``stage`` again."""
        return self.earliest(microbatch, stage)

    def gives_up(self, microbatch: Microbatch, node: int) -> bool:
        """Whether a microbatch on its way forward cannot go round a dead node."""
        return False

    def earliest(self, microbatch: Microbatch, stage: int) -> int:
        """The holder that would be done first, with all that it holds; work spreads evenly so."""
        world, fleet = self.world, self.world.fleet
        before, gone = microbatch.path[stage - 1], microbatch.path[stage]
        holders = [n for n in world.holders(stage) if n != gone] or list(world.holders(stage))

        def done_s(node: int) -> tuple[float, int]:
            held = fleet.capacity(node) - world.room(node)
            link_s = fleet.link_s(before, node) if before is not None else 0.0
            return (held + 1) * fleet.compute_s(node) + link_s, node

        return min(holders, key=done_s)

    def answered(self, microbatch: Microbatch, stage: int, seconds: float, size: float) -> None:
        """A holder did its part, ``seconds`` after it was sent to it; backward has more size."""

    def refused(self, microbatch: Microbatch, stage: int) -> None:
        """The holder that was chosen has no room; the next choice is ``next_hop``'s."""

    def returned(self, microbatch: Microbatch, stage: int) -> None:
        """The gradient of ``stage`` is back at the hop before."""

    def ended(self, microbatch: Microbatch) -> None:
        """A microbatch was committed, or goes back to the beginning; its path still stands."""

    def lost(self, node: int) -> None:
        """A crash was noticed."""

    def choose_stage(self, newcomer: int) -> int:
        """Return the stage that a newcomer will serve: by default, as the daemon chooses."""
        return stage_for(self.world, newcomer, self.path_cost_s)

    def path_cost_s(self, node: int) -> float | None:
        """Return what a holder tells of the way from it to a data node, if it knows."""
        return None

    def joined(self, node: int) -> None:
        """A newcomer serves its stage from now on."""
