"""A stage whose gradient also counts: the base of the cost model and of the toy model.

A flat gradient is ``[P parameters' gradients | one count per slot of the quota]``. Each microbatch
adds 1 at its slot, so the sum that the swarm averages shows what it contains, and every state
carries a hash chain of the counts that made it. The last channel of a boundary tensor carries the
slot through the pipeline: an activation that meets another microbatch's gradient is found out.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from protocol.errors import ProtocolViolation, StateMismatch
from protocol.manifest import Manifest, learning_rate
from protocol.ports import GroupKey, StateView, Tensor, WorkKey

_HEADER = struct.Struct("<Q32s")  # step, chain


@dataclass(frozen=True, slots=True)
class CountedState:
    """What a stage holds: optimiser steps taken, the chain of counts, weights and momentum [P]."""

    step: int
    chain: bytes
    weights_P: Tensor
    momentum_P: Tensor

    def to_bytes(self) -> bytes:
        """Return the canonical bytes."""
        numbers = torch.cat((self.weights_P, self.momentum_P)).numpy().tobytes()
        return _HEADER.pack(self.step, self.chain) + numbers

    @classmethod
    def from_bytes(cls, data: bytes) -> CountedState:
        """Read what ``to_bytes`` wrote."""
        step, chain = _HEADER.unpack_from(data)
        numbers = torch.frombuffer(
            bytearray(data[_HEADER.size :]) or bytearray(1), dtype=torch.uint8
        )
        numbers = numbers[: len(data) - _HEADER.size].view(torch.float64)
        weights_P, momentum_P = numbers.chunk(2) if len(numbers) else (numbers, numbers)
        return cls(step, chain, weights_P.clone(), momentum_P.clone())

    def digest(self) -> str:
        """Return the SHA-256 (hex) of the canonical bytes."""
        return sha256(self.to_bytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class CountedPin:
    """A state that outlives the step: states never change."""

    state: CountedState
    step: int
    digest: str

    @property
    def num_bytes(self) -> int:
        """Size of its bytes."""
        return len(self.state.to_bytes())

    def num_chunks(self, chunk_bytes: int) -> int:
        """Number of chunks."""
        return -(-self.num_bytes // chunk_bytes)

    def chunk(self, number: int, chunk_bytes: int) -> Tensor:
        """Return one chunk of its bytes."""
        data = self.state.to_bytes()[number * chunk_bytes :][:chunk_bytes]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@dataclass(slots=True)
class CountedCache:
    """How many tokens came before; nothing else is needed of them."""

    pin: CountedPin
    room: int
    num_tokens: int = 0

    def advance(self, num_tokens: int) -> None:
        """Take in more tokens; ProtocolViolation if there is no room."""
        if self.num_tokens + num_tokens > self.room:
            raise ProtocolViolation(f"more than {self.room} tokens for one cache")
        self.num_tokens += num_tokens


def rebuilt_state(
    stage: int, step: int, below_P: Tensor, above_P: Tensor, weight_above: float
) -> CountedState:
    """Return the weighted mean of two stages' weights as the state at ``step``, momentum zero."""
    weights_P = below_P + weight_above * (above_P - below_P)
    chain = sha256(f"stage {stage} rebuilt at {step}".encode()).digest()
    return CountedState(step, chain, weights_P, torch.zeros_like(weights_P))


def first_state(stage: int, weights_P: Tensor) -> CountedState:
    """Return the state at step 0."""
    chain = sha256(f"shoal simulation stage {stage}".encode()).digest()
    return CountedState(0, chain, weights_P, torch.zeros_like(weights_P))


def next_state(
    manifest: Manifest, state: CountedState, sum_PQ: Tensor, num_microbatches: int
) -> CountedState:
    """Step SGD with momentum (fp64) by the mean gradient, and extend the chain by the counts."""
    training, num_weights = manifest.training, state.weights_P.numel()
    mean_P = sum_PQ[:num_weights].double() / num_microbatches
    momentum_P = training.optimizer.momentum * state.momentum_P + mean_P
    weights_P = state.weights_P - learning_rate(training, state.step) * momentum_P
    counts = sum_PQ[num_weights:].to(torch.int64).numpy().tobytes()
    chain = sha256(state.chain + counts).digest()
    return CountedState(state.step + 1, chain, weights_P, momentum_P)


class CountedStage:
    """``StageState`` over a ``CountedState``; subclasses compute and call ``_keep``."""

    def __init__(self, manifest: Manifest, stage: int, weights_P: Tensor) -> None:
        self.manifest, self.stage = manifest, stage
        self._num_slots = manifest.training.quota
        self._state = first_state(stage, weights_P)
        self._digest = self._state.digest()
        self._before: CountedPin | None = None
        self._kept: dict[WorkKey, Tensor] = {}
        self._sums: dict[GroupKey, Tensor] = {}
        self._prepared: tuple[CountedState, str, tuple[int, ...]] | None = None
        self.counts: tuple[int, ...] = ()  # per slot, of the step that made this state

    @property
    def step(self) -> int:
        """Optimiser steps in the state."""
        return self._state.step

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the state's bytes."""
        return self._digest

    @property
    def prepared_counts(self) -> tuple[int, ...]:
        """How often each slot is in the step that made the prepared state."""
        return self._prepared[2] if self._prepared else ()

    @property
    def num_gradients(self) -> int:
        """P weights and Q slots."""
        return self._state.weights_P.numel() + self._num_slots

    def _keep(self, key: WorkKey, slot: int, gradient_P: Tensor) -> None:
        """Keep a microbatch's weight gradient and its count of one."""
        count_Q = torch.zeros(self._num_slots)
        count_Q[slot] = 1
        self._kept[key] = torch.cat((gradient_P.float(), count_Q))

    def _forget(self, key: WorkKey) -> None:
        """Forget what a subclass keeps for backward."""

    def _forget_all(self) -> None:
        """Forget all that a subclass keeps."""

    def commit(self, key: WorkKey, group: GroupKey) -> None:
        """Add the kept gradient to the group's sum; KeyError if there is none."""
        gradient = self._kept.pop(key)
        self._sums[group] = self._sums[group] + gradient if group in self._sums else gradient

    def discard(self, key: WorkKey) -> None:
        """Forget what is kept under ``key``."""
        self._kept.pop(key, None)
        self._forget(key)

    def gradient(self, groups: Sequence[GroupKey]) -> Tensor:
        """Return the fp32 sum [P + Q] over ``groups``."""
        total = torch.zeros(self.num_gradients)
        for group in groups:
            if group in self._sums:
                total += self._sums[group]
        return total

    def gradients(self, groups: Sequence[GroupKey]) -> list[Tensor]:
        """Return each group's fp32 sum [P + Q]."""
        return [self._sums[group] for group in groups]

    def prepare(self, gradient_sum: Tensor, num_microbatches: int) -> str:
        """Compute the next state beside this one and return its digest."""
        state = next_state(self.manifest, self._state, gradient_sum, num_microbatches)
        counts = tuple(int(n) for n in gradient_sum[-self._num_slots :])
        self._before = None
        self._prepared = state, state.digest(), counts
        return self._prepared[1]

    def apply(self) -> None:
        """Move to the prepared state; all gradients are dropped."""
        assert self._prepared is not None, "apply without prepare"
        self._before = CountedPin(self._state, self.step, self._digest)
        self._state, self._digest, self.counts = self._prepared
        self.reset()

    def abandon(self) -> None:
        """Drop the prepared state."""
        self._prepared = None

    def weights_of(self, stage: int, digest: str, data: Tensor) -> tuple[Tensor, float | None]:
        """Return the weights [P] in a state's bytes; nothing is known of its gradient."""
        raw = data.numpy().tobytes()
        if sha256(raw).hexdigest() != digest:
            raise StateMismatch(f"the bytes of stage {stage} are not those of {digest[:12]}")
        return CountedState.from_bytes(raw).weights_P, None

    def rebuild_from(
        self, below: Tensor, above: Tensor, weight_above: float, *, step: int, lr_scale: float
    ) -> None:
        """Take over a mean of other stages' weights [P] as the state at ``step``."""
        self.reset()
        self._state, self.counts = rebuilt_state(self.stage, step, below, above, weight_above), ()
        self._digest = self._state.digest()

    def reset(self) -> None:
        """Drop gradients, what backward needs, and the prepared state."""
        self._kept.clear()
        self._sums.clear()
        self._forget_all()
        self._prepared = None

    def export_state(self) -> Tensor:
        """Return the state's bytes as a uint8 tensor."""
        return torch.frombuffer(bytearray(self._state.to_bytes()), dtype=torch.uint8)

    def view_state(self, *, is_prepared: bool = False) -> StateView | None:
        """Return the state, or the prepared one if there is one."""
        if not is_prepared:
            return self._state.step, self._digest, (self.export_state(),)
        if self._prepared is None:
            return None
        state, digest, _ = self._prepared
        data = torch.frombuffer(bytearray(state.to_bytes()), dtype=torch.uint8)
        return state.step, digest, (data,)

    def pin(self, step: int, *, is_whole: bool) -> CountedPin | None:
        """Return the state, or until ``prepare`` the one before, if that is of ``step``."""
        pins = (CountedPin(self._state, self.step, self._digest), self._before)
        return next((pin for pin in pins if pin is not None and pin.step == step), None)

    def cache_bytes(self, num_positions: int) -> int:
        """Return a number."""
        return num_positions

    def open_cache(self, pin: CountedPin, num_positions: int) -> CountedCache:
        """Begin a sequence."""
        return CountedCache(pin, num_positions)

    def begin_with(self, data: Tensor, digest: str) -> None:
        """Take over a state of step 0."""
        self.import_state(data, digest)

    def import_state(self, data: Tensor, digest: str) -> None:
        """Take over a state; StateMismatch if it is not the one named."""
        raw = data.numpy().tobytes()
        if sha256(raw).hexdigest() != digest:
            raise StateMismatch(f"the bytes of stage {self.stage} are not those of {digest[:12]}")
        self.reset()
        self._state, self._digest, self.counts = CountedState.from_bytes(raw), digest, ()


def with_slot(x_BTC: Tensor, slot: int) -> Tensor:
    """Return fp32 [B, T, C + 1] whose last channel is the slot."""
    slot_BT1 = torch.full((*x_BTC.shape[:-1], 1), float(slot))
    return torch.cat((x_BTC.float(), slot_BT1), dim=-1)


def slot_of(h_BTW: Tensor) -> int:
    """Return the slot that a boundary tensor carries."""
    return int(h_BTW[0, 0, -1])
