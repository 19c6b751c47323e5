"""One node's processor and memory: one job at a time, and a slot for each microbatch it holds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from protocol.simulation.training.agenda import Agenda

Slot = tuple[int, int]  # a microbatch and its attempt


class Kind(StrEnum):
    """What a job computes."""

    FORWARD = "forward"
    BACKWARD = "backward"
    HEAD = "head"


class Purpose(StrEnum):
    """Why a job is done: on the way, for a microbatch that waits for it, or for a sum alone."""

    TRAIN = "train"
    REPAIR = "repair"
    LOST_SUM = "lost sum"


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of computing. Useful is what the step's sums are made of; the rest was in vain."""

    node: int
    stage: int
    kind: Kind
    microbatch: int
    start_s: float
    end_s: float
    step: int
    is_useful: bool = False


@dataclass(slots=True, eq=False)
class Job:
    """Work on one microbatch. A void job is dropped when its turn comes."""

    kind: Kind
    slot: Slot
    duration_s: float
    done: Callable[[Span], None]
    is_void: Callable[[], bool]
    purpose: Purpose = Purpose.TRAIN


class Machine:
    """A holder or a data node, from its start to its crash.

    An activation waits in the inbox until a slot is free; the slot is held until ``release``. One
    slot more is kept for repairs, so that two broken microbatches cannot wait for each other, and
    one for lost sums. Backward jobs go first (they free memory), then repairs, then forward jobs;
    lost sums, for which nobody waits before the step's end, come last.
    """

    def __init__(
        self, node: int, stage: int, capacity: int, agenda: Agenda, spans: list[Span]
    ) -> None:
        self.node, self.stage, self.capacity = node, stage, capacity
        self.is_alive = True
        self.step = 0
        self.held: dict[Slot, Purpose] = {}
        self.most_held = 0
        self._agenda, self._spans = agenda, spans
        self._inboxes: dict[Purpose, deque[Job]] = {
            purpose: deque() for purpose in (Purpose.REPAIR, Purpose.TRAIN, Purpose.LOST_SUM)
        }
        self._ready: tuple[deque[Job], ...] = (deque(), deque(), deque(), deque())
        self._running: tuple[Job, Span] | None = None

    def compute(self, job: Job) -> None:
        """Queue a job for which memory is held already, or that needs none."""
        self._ready[_rank(job)].append(job)
        self._start_next()

    def admit(self, job: Job) -> None:
        """Queue a forward job that needs a slot first."""
        self._inboxes[job.purpose].append(job)
        self._fill_slots()

    def release(self, slot: Slot) -> None:
        """Free a slot, if it is held."""
        self.held.pop(slot, None)
        if self.is_alive:
            self._fill_slots()

    def crash(self) -> None:
        """End: the running job is cut off, and all that was held is gone."""
        self.is_alive = False
        if self._running is not None:
            self._running[1].end_s = self._agenda.now
        self._running = None
        self.held.clear()
        for queue in (*self._inboxes.values(), *self._ready):
            queue.clear()

    def _fill_slots(self) -> None:
        for purpose, inbox in self._inboxes.items():
            while inbox and self._has_room(purpose):
                job = inbox.popleft()
                if not job.is_void():
                    assert job.slot not in self.held, "a microbatch takes one slot"
                    self.held[job.slot] = purpose
                    self.most_held = max(self.most_held, len(self.held))
                    self.compute(job)

    @property
    def has_room(self) -> bool:
        """Whether an activation would be taken in at once."""
        return not self._inboxes[Purpose.TRAIN] and self._has_room(Purpose.TRAIN)

    def _has_room(self, purpose: Purpose) -> bool:
        """A slot that anybody may take, or the one that is this purpose's own."""
        kinds = Counter(self.held.values())
        own = (Purpose.REPAIR, Purpose.LOST_SUM)
        beyond = sum(max(0, kinds[p] - 1) for p in own)
        shared = kinds[Purpose.TRAIN] + beyond
        return shared < self.capacity or (purpose in own and not kinds[purpose])

    def _start_next(self) -> None:
        while self._running is None:
            queue = next((queue for queue in self._ready if queue), None)
            if queue is None:
                return
            job = queue.popleft()
            if not job.is_void():
                self._run(job)

    def _run(self, job: Job) -> None:
        now = self._agenda.now
        span = Span(
            self.node, self.stage, job.kind, job.slot[0], now, now + job.duration_s, self.step
        )
        self._spans.append(span)
        self._running = job, span
        self._agenda.at(span.end_s, lambda: self._finish(job, span))

    def _finish(self, job: Job, span: Span) -> None:
        if not self.is_alive:
            return
        self._running = None
        if not job.is_void():
            job.done(span)
        self._start_next()


def _rank(job: Job) -> int:
    if job.purpose is Purpose.LOST_SUM:
        return 3
    if job.kind is Kind.BACKWARD:
        return 0
    return 1 if job.purpose is Purpose.REPAIR else 2
