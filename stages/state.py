"""What all stages do with their parameters: gradients apart, sums per group, two-phase steps.

Weights and moments lie in one flat fp32 buffer, [1 + moments, n]; parameters are views into it.
There are two such buffers: ``prepare`` writes the next state into the one not in use, ``apply``
swaps them, and the old one stays as it was until the next ``prepare``. Not thread-safe: one
worker calls.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from weakref import WeakSet

import torch

from protocol.errors import NonFinite, ProtocolViolation, StateMismatch
from protocol.manifest import Manifest, learning_rate
from stages.device import usable_device
from stages.initialisation import fill_initial
from stages.layout import Layout, initial_head, stage_layout
from stages.optimiser import clip_factor, make_optimiser, norm_of, optimise
from stages.pins import PinnedState
from stages.recovery import check_alike, merge, read_weights
from stages.snapshot import Course, SnapshotFormat, snapshot_format

Tensor = torch.Tensor
WorkKey = Hashable
GroupKey = Hashable

_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class WeightGradient:
    """The gradient of one microbatch by leaf number: whole matrices, or some rows of one."""

    dense: dict[int, Tensor] = field(default_factory=dict)
    rows: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        pairs = [tensor for pair in self.rows.values() for tensor in pair]
        return sum(tensor.nbytes for tensor in (*self.dense.values(), *pairs))


class _Buffers:
    """One complete state: weights and moments, the leaves that autograd sees, and its format."""

    def __init__(self, form: SnapshotFormat, device: torch.device) -> None:
        layout = form.layout
        self.form = form
        self.data = torch.zeros(1 + form.num_moments, layout.num_elements, device=device)
        self.leaves = [view.detach().requires_grad_() for view in layout.leaf_views(self.data[0])]


class _Sum:
    """A flat gradient sum and its view per leaf."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat = torch.zeros(layout.num_elements, device=device)
        self._views = layout.leaf_views(self.flat)

    def add(self, gradient: WeightGradient) -> None:
        """Add the gradient of one microbatch."""
        if gradient.dense:
            views = [self._views[leaf] for leaf in gradient.dense]
            torch._foreach_add_(views, list(gradient.dense.values()))
        for leaf, (rows, values) in gradient.rows.items():
            self._views[leaf].index_add_(0, rows, values)


class TorchStageState(ABC):
    """The state of one stage of a swarm, at step 0 when made. Implements StageState."""

    def __init__(self, manifest: Manifest, stage: int, device: str = "cpu") -> None:
        training = manifest.training
        self._device = usable_device(device)
        self.stage = stage
        self.gradient_norm = 0.0  # of the last prepared step, before clipping
        self.update_norm = 0.0  # of the last prepared change of the weights
        self._manifest = manifest
        self._model = manifest.model
        self._training = training
        self._wire_dtype = _WIRE_DTYPES[manifest.pipeline.wire_dtype]
        self._layout = stage_layout(manifest, stage)
        self._rule = make_optimiser(training.optimizer)
        form = snapshot_format(manifest, stage)
        self._current, self._other = (_Buffers(form, self._device) for _ in range(2))
        fill_initial(self._current.data[0], self._layout, training.seed, self._model.layers)
        self._step = 0
        self._digest: str | None = None
        self._prepared: str | None = None
        self._before: tuple[int, str] | None = None  # of the state in the buffers not in use
        self._pins: WeakSet[PinnedState] = WeakSet()
        self._gradients: dict[WorkKey, WeightGradient] = {}
        self._sums: dict[GroupKey, _Sum] = {}
        self._spare_sums: list[_Sum] = []

    @property
    def step(self) -> int:
        """The number of optimiser steps in this state."""
        return self._step

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical bytes of the state at ``step``."""
        if self._digest is None:
            self._digest = self._current.form.digest(self._step, self._current.data)
        return self._digest

    @property
    def num_gradients(self) -> int:
        """Number of elements of the flat gradient."""
        return self._layout.num_elements

    @property
    def state_bytes(self) -> int:
        """Memory of the state itself: weights and moments, current and next, in bytes."""
        return self._current.data.nbytes + self._other.data.nbytes

    @property
    def bytes_kept(self) -> int:
        """Memory held for microbatches in flight and for gradient sums, in bytes.

        May be read from any thread: it looks at copies of what the worker changes.
        """
        sums = len(self._sums) + len(self._spare_sums)
        apart = sum(gradient.num_bytes for gradient in list(self._gradients.values()))
        return apart + sums * 4 * self.num_gradients + self._work_bytes()

    def named_weights(self) -> dict[str, Tensor]:
        """Return the weights by Hugging Face name: views, valid until the next ``apply``."""
        return self._layout.named_views(self._current.data[0])

    def commit(self, key: WorkKey, group: GroupKey) -> None:
        """Add the weight gradient kept under ``key`` to the sum of ``group``; KeyError if none."""
        gradient = self._take_gradient(key)
        if group not in self._sums:
            self._sums[group] = self._new_sum()
        self._sums[group].add(gradient)

    def discard(self, key: WorkKey) -> None:
        """Forget whatever is kept under ``key``; nothing happens if there is nothing."""
        self._gradients.pop(key, None)
        self._drop_work(key)

    @torch.no_grad()
    def gradient(self, groups: Sequence[GroupKey]) -> Tensor:
        """Return the flat fp32 sum over ``groups`` in the order given; zeros where none is."""
        total = torch.zeros(self.num_gradients, device=self._device)
        for group in groups:
            if group in self._sums:
                total.add_(self._sums[group].flat)
        return total.cpu()

    def gradients(self, groups: Sequence[GroupKey]) -> list[Tensor]:
        """Return each group's flat fp32 sum, not to be changed; KeyError where none is."""
        return [self._sums[group].flat.cpu() for group in groups]

    @torch.no_grad()
    def prepare(self, gradient_sum: Tensor, num_microbatches: int) -> str:
        """Divide by the count, clip, step the optimiser into new buffers; return their digest.

        Raises NonFinite if the gradient is not finite; the state is then as it was.
        """
        self.abandon()
        if gradient_sum.shape != (self.num_gradients,) or num_microbatches < 1:
            raise ValueError(f"{tuple(gradient_sum.shape)} over {num_microbatches} microbatches")
        mean = gradient_sum.to(self._device) * (1 / num_microbatches)
        self.gradient_norm = norm_of(mean)
        if not math.isfinite(self.gradient_norm):
            raise NonFinite(self.stage, "gradient", "the averaging")
        factor = clip_factor(self.gradient_norm, self._training.clip_norm)
        if factor < 1:
            mean.mul_(factor)
        old, new = self._current.data, self._writable()
        form = self._current.form
        rate, since = learning_rate(self._training, self._step), 0
        if form.course is not None:
            rate, since = rate * form.course.lr_scale, form.course.fresh_at
            form = replace(form, course=form.course.after(self.gradient_norm))
        count = self._step + 1 - since
        self.update_norm = optimise(self._rule, old, new, mean, lr=rate, t=count)
        self._other.form = form
        self._prepared = form.digest(self._step + 1, new)
        return self._prepared

    def apply(self) -> None:
        """Make the prepared buffers the state (step + 1); drop all gradients."""
        if self._prepared is None:
            raise ValueError("nothing is prepared")
        self._become(self._step + 1, self._prepared)

    def abandon(self) -> None:
        """Drop the prepared buffers, if any; gradients stay."""
        self._prepared = None

    def reset(self) -> None:
        """Drop all gradients, kept graphs and prepared buffers."""
        self.abandon()
        self._gradients.clear()
        self._spare_sums.extend(self._sums.values())
        self._sums.clear()
        self._drop_all_work()

    def export_state(self) -> Tensor:
        """Return the canonical bytes of the state at ``step`` as a uint8 tensor."""
        return self._current.form.encode(self._step, self._current.data)

    def view_state(
        self, *, is_prepared: bool = False
    ) -> tuple[int, str, tuple[Tensor, ...]] | None:
        """Return step, digest and canonical bytes in pieces, without a copy of the numbers.

        The pieces of the state in use stay as they are until the second ``prepare`` from now, or
        until the next ``import_state``; those of the prepared one also until it is abandoned.
        None if nothing is prepared.
        """
        if not is_prepared:
            current = self._current
            return self._step, self.digest, current.form.pieces(self._step, current.data)
        if self._prepared is None:
            return None
        step = self._step + 1
        return step, self._prepared, self._other.form.pieces(step, self._other.data)

    def import_state(self, data: Tensor, digest: str) -> None:
        """Replace the state; raise StateMismatch if the bytes do not have this digest."""
        self.abandon()
        step, self._other.form = self._current.form.decode(data, digest, self._writable())
        self._become(step, digest)
        self._before = None  # perhaps one that nobody decided on

    @property
    def course(self) -> Course | None:
        """What the state knows of how it came about; None where stages are never rebuilt."""
        return self._current.form.course

    @torch.no_grad()
    def rebuild(self, weights: Tensor, step: int, lr_scale: float) -> None:
        """Begin at ``step`` with flat ``weights`` and a fresh optimiser, as after CheckFree.

        ``lr_scale`` is set, not multiplied: a stage that is rebuilt twice has it once. The schedule
        of the learning rate goes by the step.
        """
        if self.course is None or weights.shape != (self.num_gradients,):
            raise ValueError(f"stage {self.stage} cannot begin with {tuple(weights.shape)}")
        data = self._writable()
        data[0].copy_(weights)
        data[1:].zero_()
        self._replace(step, Course(fresh_at=step, lr_scale=lr_scale))

    def weights_of(self, stage: int, digest: str, data: Tensor) -> tuple[Tensor, float | None]:
        """Return the flat weights in another stage's canonical bytes, and its gradient norm.

        Raises StateMismatch if the bytes do not have this digest, or are of another shape.
        """
        check_alike(self._manifest, self.stage, stage)
        read = read_weights(self._manifest, stage, digest, [data])
        return read.weights, read.gradient_norm

    def rebuild_from(
        self, below: Tensor, above: Tensor, weight_above: float, *, step: int, lr_scale: float
    ) -> None:
        """Begin at ``step`` with the weighted mean of two other stages' flat weights."""
        self.rebuild(merge(below, above, weight_above), step, lr_scale)

    def move_to(self, step: int) -> None:
        """Take this state, older than the others', for that of ``step``; moments stay as they are.

        So a stage goes on from its sparse checkpoint while its neighbours keep what they have.
        """
        course = self.course
        if course is None or step < self._step:
            raise ValueError(f"stage {self.stage} cannot move from step {self._step} to {step}")
        self._writable().copy_(self._current.data)
        later = course.fresh_at + step - self._step
        self._replace(step, replace(course, fresh_at=later, gradient_norm=None))

    def _replace(self, step: int, course: Course) -> None:
        """Make the buffers not in use the state, which no step led to."""
        self._other.form = replace(self._current.form, course=course)
        self._become(step, self._other.form.digest(step, self._other.data))
        self._before = None

    def pin(self, step: int, *, is_whole: bool) -> PinnedState | None:
        """Keep the state at ``step``, or its weights, as long as the result lives.

        It can be the one in use, or the one before until the next ``prepare``; else None.
        """
        for buffers, known in (
            (self._current, (self._step, self.digest)),
            (self._other, self._before),
        ):
            if known is not None and known[0] == step:
                pin = PinnedState(
                    self._layout, buffers.form, *known, buffers.data, is_whole=is_whole
                )
                self._pins.add(pin)
                return pin
        return None

    @property
    def pinned_bytes(self) -> int:
        """Memory held by states that the stage has left behind, in bytes."""
        return sum(pin.bytes_copied for pin in list(self._pins))

    def _writable(self) -> Tensor:
        """The buffers not in use, once nobody needs what they hold."""
        self._before = None
        for pin in list(self._pins):
            pin.part(self._other.data)
        return self._other.data

    def begin_with(self, data: Tensor, digest: str) -> None:
        """Be at step 0 with the weights of a file of ``stages.hf_import``.

        Raises StateMismatch, with the state untouched, unless the bytes have this digest and are
        weights of this stage.
        """
        head = initial_head(self._layout)
        raw = data.numpy().data
        if sha256(raw).hexdigest() != digest or bytes(raw[: len(head)]) != head:
            raise StateMismatch(f"these are not the weights with which stage {self.stage} begins")
        buffers = self._writable().zero_()
        buffers[0].view(torch.uint8).copy_(data[len(head) :])
        self._other.form = form = self._current.form
        self._become(0, form.digest(0, buffers))
        self._before = None

    def _become(self, step: int, digest: str) -> None:
        self.reset()
        self._before = self._step, self.digest
        self._current, self._other = self._other, self._current
        self._step, self._digest = step, digest

    def _new_sum(self) -> _Sum:
        if not self._spare_sums:
            return _Sum(self._layout, self._device)
        spare = self._spare_sums.pop()
        spare.flat.zero_()
        return spare

    def _take_gradient(self, key: WorkKey) -> WeightGradient:
        return self._gradients.pop(key)

    def _received(self, x_BTW: Tensor, direction: str) -> Tensor:
        """Return what a neighbour sent in fp32, checked; raise ProtocolViolation or NonFinite."""
        is_float = x_BTW.dtype in _WIRE_DTYPES.values()
        fits = x_BTW.dim() == 3 and x_BTW.shape[2] == self._model.width
        if not (is_float and fits and 0 < x_BTW.shape[1] <= self._model.context and len(x_BTW)):
            raise ProtocolViolation(
                f"stage {self.stage} got a {direction} tensor {x_BTW.dtype} {tuple(x_BTW.shape)}"
            )
        x_BTW = x_BTW.to(self._device, torch.float32)
        # One NaN or infinity makes the sum so: cheaper than looking at each element.
        if not math.isfinite(float(x_BTW.sum())):
            raise NonFinite(self.stage, direction, "")
        return x_BTW

    def _sent(self, x_BTW: Tensor) -> Tensor:
        return x_BTW.detach().to("cpu", self._wire_dtype)

    @abstractmethod
    def _work_bytes(self) -> int:
        """Memory held between the passes of microbatches in flight."""

    @abstractmethod
    def _drop_work(self, key: WorkKey) -> None:
        """Forget what one microbatch's passes left, if anything."""

    @abstractmethod
    def _drop_all_work(self) -> None:
        """Forget what all passes left."""
