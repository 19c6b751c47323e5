"""What is done for each microbatch that a dead holder had to do with.

- The activation never got through: whoever has it sends it to another holder (all policies).
- The gradient cannot go back: another holder computes the stage again, or everything is computed
  again, as the policy has it.
- The gradient went back, and the sum that it was added to died with the holder: another holder
  computes the stage again for the sum alone (all policies; where the input comes from differs).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.simulation.training.machine import Job, Kind, Purpose, Span
from protocol.simulation.training.microbatch import Microbatch, Phase, Repair
from protocol.simulation.training.policies.base import Recovery

if TYPE_CHECKING:
    from protocol.simulation.training.run import TrainingRun


class Recoveries:
    """Decides when a crash is noticed, and when a gradient finds its holder dead."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run

    def after_loss_of(self, node: int) -> None:
        """Look after every microbatch of the step that ``node`` had to do with."""
        stage = self._run.machines[node].stage
        if stage in self._run.closing.aggregated:
            return
        for microbatch in list(self._run.microbatches):
            if microbatch.phase is Phase.FORWARD and self._run.policy.gives_up(microbatch, node):
                self.restart(microbatch)
            if microbatch.phase is not Phase.WAITING:
                self._repairs_from(microbatch, node)
            if microbatch.phase is not Phase.WAITING and microbatch.path[stage] == node:
                self._look_after(microbatch, stage, node)

    def _repairs_from(self, microbatch: Microbatch, node: int) -> None:
        """A neighbour died before it had sent what a repair needs: begin that again."""
        for stage, repair in list(microbatch.repairs.items()):
            if any(t.is_cut and t.source == node for t in repair.transfers):
                self._again(microbatch, stage, repair.continues)

    def _look_after(self, microbatch: Microbatch, stage: int, node: int) -> None:
        repair = microbatch.repairs.get(stage)
        if repair is not None:
            self._again(microbatch, stage, repair.continues)
        elif stage in microbatch.backwards:
            self._lost_sum(microbatch, stage, node)
        elif microbatch.phase is Phase.FORWARD:
            self._in_forward(microbatch, stage, node)
        elif microbatch.stage == stage or self._run.policy.recovery is Recovery.RESTART:
            self.recover(microbatch, stage)

    def _in_forward(self, microbatch: Microbatch, stage: int, node: int) -> None:
        run = self._run
        is_unsent = microbatch.stage == stage + 1 and microbatch.is_cut_by(node)
        if microbatch.stage == stage or is_unsent:
            if not run.machines[microbatch.holder(stage - 1)].is_alive:
                self.restart(microbatch)
                return
            run.outcome.counts["resends"] += 1
            if is_unsent and stage < run.num_stages:
                run.unassign(microbatch, stage + 1)
            microbatch.forwards.pop(stage, None)
            run.passes.forward(microbatch, stage)
        elif run.policy.recovery is Recovery.RESTART:
            self.restart(microbatch)

    def _lost_sum(self, microbatch: Microbatch, stage: int, node: int) -> None:
        run = self._run
        del microbatch.backwards[stage]
        is_unsent = (
            microbatch.phase is Phase.BACKWARD
            and microbatch.stage == stage - 1
            and microbatch.is_cut_by(node)
        )
        if is_unsent:
            microbatch.stage = stage
            self.recover(microbatch, stage)
            return
        run.outcome.counts["lost_sums"] += 1
        if not run.fleet.workload.is_exact:
            del microbatch.forwards[stage]
            return
        self._again(microbatch, stage, continues=False)

    def recover(self, microbatch: Microbatch, stage: int) -> None:
        """The gradient stands before a dead holder."""
        if self._run.policy.recovery is Recovery.RESTART:
            self.restart(microbatch)
            return
        self._run.outcome.counts["repairs"] += 1
        self._again(microbatch, stage, continues=True)

    def restart(self, microbatch: Microbatch) -> None:
        """Begin the microbatch again, under another attempt."""
        run = self._run
        run.outcome.counts["restarts"] += 1
        if microbatch.phase is Phase.COMMITTED:
            run.free(microbatch)
        else:
            run.end(microbatch)
        microbatch.forget()
        run.pending[microbatch.data_node].appendleft(microbatch)

    def _again(self, microbatch: Microbatch, stage: int, continues: bool) -> None:
        """Let another holder compute one stage of a microbatch."""
        run, data_node = self._run, microbatch.data_node
        old = microbatch.repairs.pop(stage, None)
        if old is not None:
            old.is_void = True
        sources = (data_node, data_node)
        if run.policy.recovery is Recovery.PATH:
            sources = microbatch.holder(stage - 1), microbatch.holder(stage + 1)
            if not all(run.machines[n].is_alive for n in sources):
                self.restart(microbatch)
                return
        microbatch.ticket += continues
        node = run.policy.replacement(microbatch, stage)
        run.assign(microbatch, stage, node)
        repair = microbatch.repairs[stage] = Repair(node, continues)
        delay_s = sum(run.fleet.latency_s(a, data_node) for a in sources if a != data_node)
        for _ in range(3):  # an alarm, a request to either neighbour
            run.count_message()
        run.agenda.after(delay_s, lambda: self._supply(microbatch, stage, repair, sources))

    def _supply(
        self, microbatch: Microbatch, stage: int, repair: Repair, sources: tuple[int, int]
    ) -> None:
        if repair.is_void:
            return
        send = self._run.links.send
        repair.transfers = [
            send(sources[0], repair.node, lambda: self._input_came(microbatch, stage, repair)),
            send(sources[1], repair.node, lambda: self._gradient_came(microbatch, stage, repair)),
        ]

    def _job(
        self, microbatch: Microbatch, repair: Repair, kind: Kind, done: Callable[[Span], None]
    ) -> Job:
        fleet = self._run.fleet
        purpose = Purpose.REPAIR if repair.continues else Purpose.LOST_SUM
        seconds = fleet.forward_s if kind is Kind.FORWARD else fleet.backward_s
        return Job(
            kind, microbatch.slot, seconds(repair.node), done, lambda: repair.is_void, purpose
        )

    def _input_came(self, microbatch: Microbatch, stage: int, repair: Repair) -> None:
        if repair.is_void:
            return

        def done(span: Span) -> None:
            repair.forward = span
            self._go_back(microbatch, stage, repair)

        machine = self._run.machines[repair.node]
        machine.admit(self._job(microbatch, repair, Kind.FORWARD, done))

    def _gradient_came(self, microbatch: Microbatch, stage: int, repair: Repair) -> None:
        repair.has_gradient = True
        self._go_back(microbatch, stage, repair)

    def _go_back(self, microbatch: Microbatch, stage: int, repair: Repair) -> None:
        if repair.is_void or repair.forward is None or not repair.has_gradient:
            return
        machine = self._run.machines[repair.node]
        machine.compute(
            self._job(
                microbatch, repair, Kind.BACKWARD,
                lambda span: self._mended(microbatch, stage, repair, span),
            )
        )  # fmt: skip

    def _mended(self, microbatch: Microbatch, stage: int, repair: Repair, span: Span) -> None:
        run = self._run
        assert repair.forward is not None
        microbatch.forwards[stage], microbatch.backwards[stage] = repair.forward, span
        del microbatch.repairs[stage]
        if repair.continues:
            run.passes.backward(microbatch, stage - 1)
            return
        if microbatch.phase is Phase.COMMITTED:
            # Its data node has spoken already: nothing to wait for.
            run.machines[repair.node].release(microbatch.slot)
            run.closing.check()
