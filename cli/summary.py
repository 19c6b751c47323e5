"""What the demo tells at its end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cli.output import emit, emit_json, facts, printable
from cli.picture import chart, draw_loss
from node.status import StepStatus

if TYPE_CHECKING:
    from cli.watch import Watch
    from node.local_swarm import LocalSwarm


def summarise(
    swarm: LocalSwarm, watch: Watch, sample: str, num_leftover: int, *, as_json: bool
) -> None:
    """Draw the loss curve and print the result, as text or as one JSON object."""
    entropies = _entropies(swarm)
    picture = swarm.root / "loss.png"
    losses = [(step.step + 1, step.loss) for step in watch.steps if step.loss is not None]
    held_out = [
        (step.step + 1, step.validation_loss)
        for step in watch.steps
        if step.validation_loss is not None
    ]
    draw_loss(picture, losses, held_out, entropies)
    result = _result(watch, entropies, num_leftover)
    if as_json:
        emit_json(result)
    else:
        _print(swarm.root, picture, result, [loss for _, loss in losses], sample)


def _entropies(swarm: LocalSwarm) -> dict[str, float]:
    """Return the unigram and the bigram entropy of the text, in nats per token."""
    from stages.data import load_corpus

    corpus = load_corpus(swarm.manifest, swarm.data)
    return {
        "unigram entropy": corpus.unigram_entropy(),
        "bigram entropy": corpus.bigram_entropy(),
    }


def _result(watch: Watch, entropies: dict[str, float], num_leftover: int) -> dict[str, object]:
    steps = watch.steps
    seconds = sum(step.seconds for step in steps)
    return {
        "steps": len(steps),
        "loss_first": _finite(steps[0].loss),
        "loss_last": _finite(steps[-1].loss),
        "val_loss": _last_validation(steps),
        "unigram_entropy": entropies["unigram entropy"],
        "bigram_entropy": entropies["bigram entropy"],
        "tokens_per_s": sum(step.tokens for step in steps) / seconds if seconds else None,
        "committed": sum(step.committed for step in steps),
        "reissued": sum(step.reissued for step in steps),
        "seconds_to_first_commit": watch.first_commit_s,
        "leftover_processes": num_leftover,
    } | _losses(watch)


def _losses(watch: Watch) -> dict[str, object]:
    """What was killed and healed; nothing without chaos."""
    losses = watch.chaos.losses
    if not losses:
        return {}
    return {
        "killed": watch.chaos.num_killed,
        "stages_lost": sum(loss.was_last for loss in losses),
        "stages_healed": sum(bool(loss.healed) for loss in losses),
    }


def _last_validation(steps: list[StepStatus]) -> float | None:
    known = [step.validation_loss for step in steps if step.validation_loss is not None]
    return _finite(known[-1]) if known else None


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN."""
    return value if value is not None and math.isfinite(value) else None


def _print(
    root: Path, picture: Path, result: dict[str, object], losses: list[float], sample: str
) -> None:
    emit("")
    for line in chart(losses):
        emit(line)
    emit("\n" + facts({name.replace("_", " "): _text(value) for name, value in result.items()}))
    if sample:
        emit(f"\nwritten by the swarm, after 'def ':\n\n{printable(sample)}")
    emit(
        "\n"
        + facts(
            {
                "loss curve": picture,
                "weights": root / "*/weights",
                "logs": root / "*/log.jsonl",
                "the run": root,
            }
        )
    )


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if value < 1000 else f"{value:.0f}"
    return "-" if value is None else str(value)
