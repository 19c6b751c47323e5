"""A session between two simulated nodes, and the frames that pass it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgpack

from protocol.keys import PeerId
from protocol.messages import MESSAGE_TYPES, Lane, Message
from protocol.ports import Tensor
from protocol.simulation.timeline import Outcome

_OVERHEAD_BYTES: Final = 32  # length prefixes, stream header and acknowledgement

SizeOf = Callable[[Message, Sequence[Tensor]], int]


def tensor_bytes(_message: Message, tensors: Sequence[Tensor]) -> int:
    """Return what the tensors weigh on the wire; tensors on the meta device count in full."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A message as it is received, its own copy of the tensors and its size."""

    message: Message
    tensors: tuple[Tensor, ...]
    size_bytes: int

    @property
    def lane(self) -> Lane:
        """The connection of the session that carries it."""
        return self.message.lane


class Codec:
    """Passes messages through their wire form; a broadcast message is encoded once."""

    def __init__(self, size_of: SizeOf = tensor_bytes) -> None:
        self._size_of = size_of
        self._last: tuple[Message, Message, int] | None = None

    def frame(self, message: Message, tensors: Sequence[Tensor]) -> Frame:
        """Return what the receiver will get; ValueError for more tensors than the kind allows."""
        if len(tensors) > message.max_tensors:
            raise ValueError(f"{message.kind} carries at most {message.max_tensors} tensors")
        received, header_bytes = self._received(message)
        size = header_bytes + self._size_of(message, tensors) + _OVERHEAD_BYTES
        return Frame(received, tuple(t.detach().clone() for t in tensors), size)

    def _received(self, message: Message) -> tuple[Message, int]:
        if self._last is None or self._last[0] is not message:
            data: bytes = msgpack.packb(message.model_dump())
            received = MESSAGE_TYPES[message.kind].model_validate(msgpack.unpackb(data))
            self._last = message, received, len(data)
        return self._last[1], self._last[2]


@dataclass(eq=False)
class Session:
    """What two nodes share while they are connected; each side has its own view of the end.

    ``arrived_until`` keeps each lane in order, ``awaited`` holds the sends without an
    acknowledgement, ``held`` what a cut of that direction keeps from arriving; by sender.
    """

    sides: tuple[PeerId, PeerId]
    arrived_until: dict[tuple[PeerId, Lane], float] = field(default_factory=dict)
    awaited: dict[PeerId, dict[Outcome[None], None]] = field(default_factory=dict)
    held: dict[PeerId, list[Callable[[], None]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for side in self.sides:
            self.awaited[side], self.held[side] = {}, []

    def other(self, side: PeerId) -> PeerId:
        """Return the opposite side."""
        a, b = self.sides
        return b if side == a else a

    def in_order(self, sender: PeerId, lane: Lane, arrival_s: float) -> float:
        """Return when a frame arrives that may not overtake the one before it on its lane."""
        arrival_s = max(arrival_s, self.arrived_until.get((sender, lane), 0.0))
        self.arrived_until[sender, lane] = arrival_s
        return arrival_s
