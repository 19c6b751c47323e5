"""The undisturbed way of a microbatch: forward, loss, backward, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.simulation.training.machine import Job, Kind, Span
from protocol.simulation.training.microbatch import Microbatch, Phase

if TYPE_CHECKING:
    from protocol.simulation.training.run import TrainingRun

_FORWARD_SIZE, _BACKWARD_SIZE = 1.0, 2.5
# Between two rounds of offers to holders without room; as the daemon does it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Passes:
    """Moves microbatches on from stage to stage."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def forward(self, microbatch: Microbatch, stage: int) -> None:
        """Send what was computed last to a holder of ``stage``, or home for the loss."""
        microbatch.phase, microbatch.stage = Phase.FORWARD, stage
        microbatch.refused.clear()
        microbatch.pause_s = _FIRST_PAUSE_S
        self._offer(microbatch)

    def _offer(self, microbatch: Microbatch) -> None:
        run, stage = self._run, microbatch.stage
        microbatch.is_kept = False
        if stage <= run.num_stages:
            node = run.policy.next_hop(microbatch, stage)
            while node in run.noticed:  # who chose has not heard of it yet: the sending fails
                microbatch.refused.add(node)
                run.policy.refused(microbatch, stage)
                node = run.policy.next_hop(microbatch, stage)
            if node is None:
                self._pause(microbatch)
                return
            run.assign(microbatch, stage, node)
        self._carry(microbatch, stage - 1, stage, self._forward_arrived)

    def _pause(self, microbatch: Microbatch) -> None:
        """Everybody there is full: ask them all again, a moment later."""
        microbatch.refused.clear()
        self._keep(microbatch, microbatch.pause_s)
        microbatch.pause_s = min(2 * microbatch.pause_s, _LONGEST_PAUSE_S)

    def _keep(self, microbatch: Microbatch, delay_s: float) -> None:
        """The hop before keeps the activation, and offers it again then if it still lives."""
        run, before = self._run, microbatch.holder(microbatch.stage - 1)
        microbatch.ticket += 1
        microbatch.is_kept, ticket = True, microbatch.ticket

        def again() -> None:
            if microbatch.ticket == ticket and run.machines[before].is_alive:
                self._offer(microbatch)

        run.agenda.after(delay_s, again)

    def _refuse(self, microbatch: Microbatch, node: int) -> None:
        run, stage = self._run, microbatch.stage
        run.policy.refused(microbatch, stage)
        run.unassign(microbatch, stage)
        run.count_message()
        run.outcome.counts["refusals"] += 1
        microbatch.refused.add(node)
        self._keep(microbatch, run.fleet.latency_s(node, microbatch.holder(stage - 1)))

    def backward(self, microbatch: Microbatch, stage: int) -> None:
        """Send the gradient to the holder of ``stage``; to stage 0 is home."""
        microbatch.phase, microbatch.stage = Phase.BACKWARD, stage
        if microbatch.holder(stage) in self._run.noticed:
            self._run.recoveries.recover(microbatch, stage)
        else:
            self._carry(microbatch, stage + 1, stage, self._backward_arrived)

    def _carry(
        self, microbatch: Microbatch, origin: int, stage: int, then: Callable[[Microbatch], None]
    ) -> None:
        run = self._run
        microbatch.ticket += 1
        microbatch.sent_s = run.agenda.now
        ticket = microbatch.ticket

        def arrived() -> None:
            if microbatch.ticket == ticket:
                then(microbatch)

        source, target = microbatch.holder(origin), microbatch.holder(stage)
        microbatch.transfer = run.links.send(source, target, arrived)

    def _job(
        self, microbatch: Microbatch, kind: Kind, duration_s: float, done: Callable[[Span], None]
    ) -> Job:
        ticket = microbatch.ticket
        return Job(kind, microbatch.slot, duration_s, done, lambda: microbatch.ticket != ticket)

    def _forward_arrived(self, microbatch: Microbatch) -> None:
        run, stage = self._run, microbatch.stage
        node = microbatch.holder(stage)
        machine = run.machines[node]
        if stage > run.num_stages:
            duration_s = run.fleet.head_s(node)
            machine.compute(
                self._job(microbatch, Kind.HEAD, duration_s, lambda s: self._lost_at(microbatch, s))
            )
            return
        if run.policy.refuses and not machine.has_room:
            self._refuse(microbatch, node)
            return
        duration_s = run.fleet.forward_s(node)
        machine.admit(
            self._job(microbatch, Kind.FORWARD, duration_s, lambda s: self._went(microbatch, s))
        )

    def _went(self, microbatch: Microbatch, span: Span) -> None:
        stage = microbatch.stage
        microbatch.forwards[stage] = span
        self._note(microbatch, _FORWARD_SIZE)
        self.forward(microbatch, stage + 1)

    def _lost_at(self, microbatch: Microbatch, span: Span) -> None:
        """The loss is known."""
        microbatch.forwards[microbatch.stage] = span
        self.backward(microbatch, self._run.num_stages)

    def _backward_arrived(self, microbatch: Microbatch) -> None:
        run, stage = self._run, microbatch.stage
        node = microbatch.holder(stage)
        run.policy.returned(microbatch, stage + 1)
        if stage == 0:
            self._commit(microbatch)
            return
        duration_s = run.fleet.backward_s(node)
        run.machines[node].compute(
            self._job(microbatch, Kind.BACKWARD, duration_s, lambda s: self._came(microbatch, s))
        )

    def _came(self, microbatch: Microbatch, span: Span) -> None:
        stage = microbatch.stage
        microbatch.backwards[stage] = span
        self._note(microbatch, _BACKWARD_SIZE)
        self.backward(microbatch, stage - 1)

    def _note(self, microbatch: Microbatch, size: float) -> None:
        run = self._run
        run.policy.answered(microbatch, microbatch.stage, run.agenda.now - microbatch.sent_s, size)
        run.closing.job_done()

    def _commit(self, microbatch: Microbatch) -> None:
        microbatch.phase = Phase.COMMITTED
        self._run.end(microbatch)
        self._run.issue()
        self._run.closing.check()
