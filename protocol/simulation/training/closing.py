"""The end of a step: all committed, sums added up stage by stage, the next one opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.simulation.training.outcome import StepOutcome

if TYPE_CHECKING:
    from protocol.simulation.training.run import TrainingRun


class Closing:
    """Knows how far the step is, and which stages have added up their sums."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._start_s = 0.0
        self._committed_s: float | None = None
        self._num_jobs = 0
        self.aggregated: set[int] = set()
        self._aggregating: dict[int, int] = {}
        self._num_tries = 0

    def begin(self, now: float) -> None:
        """A step opens."""
        self._start_s, self._committed_s, self._num_jobs = now, None, 0
        self.aggregated = set()
        self._aggregating = {}

    def job_done(self) -> None:
        """A forward or backward job of the step was done."""
        self._num_jobs += 1
        self._run.progressed(self._num_jobs)

    def crashed(self, stage: int) -> None:
        """A member of a stage died: what it was adding up is not valid."""
        self._aggregating.pop(stage, None)

    def check(self) -> None:
        """Begin to add up where that is possible: all work done, and no member is silent."""
        run = self._run
        if len(self.aggregated) == run.num_stages or not all(m.is_done for m in run.microbatches):
            return
        if self._committed_s is None:
            self._committed_s = run.agenda.now
        for stage in range(1, run.num_stages + 1):
            members = run.holders(stage)
            is_silent = any(not run.machines[n].is_alive for n in members)
            if stage not in self.aggregated and stage not in self._aggregating and not is_silent:
                self._aggregate(stage, members)

    def _aggregate(self, stage: int, members: tuple[int, ...]) -> None:
        self._num_tries += 1
        self._aggregating[stage] = mine = self._num_tries

        def done() -> None:
            if self._aggregating.get(stage) == mine:
                del self._aggregating[stage]
                self.aggregated.add(stage)
                self._end_if_whole()

        for _ in members:
            self._run.count_message()
        self._run.agenda.after(self._run.fleet.aggregation_s(members), done)

    def _end_if_whole(self) -> None:
        run = self._run
        if len(self.aggregated) < run.num_stages:
            return
        delay_s = run.fleet.workload.update_s + run.fleet.decision_s()
        run.agenda.after(delay_s, self._end)

    def _end(self) -> None:
        run, now = self._run, self._run.agenda.now
        assert self._committed_s is not None
        for microbatch in run.microbatches:
            for span in (*microbatch.forwards.values(), *microbatch.backwards.values()):
                span.is_useful = True
        run.outcome.steps.append(
            StepOutcome(
                run.step, self._start_s, now, now - self._committed_s, len(run.microbatches)
            )
        )
        run.open_step()
