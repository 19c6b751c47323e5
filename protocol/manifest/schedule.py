"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from protocol.manifest.specs import TrainingSpec


def learning_rate(training: TrainingSpec, step: int) -> float:
    """Return the learning rate of ``step`` (0-based): linear warm-up, then the schedule's decay.

    The first step after the warm-up has the full rate; the step after the last would have
    ``final_fraction`` of it.
    """
    schedule, peak = training.schedule, training.optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    done = min(1.0, (step - schedule.warmup_steps) / max(1, training.steps - schedule.warmup_steps))
    left = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * left)
