"""What must hold in every run, whatever befell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.manifest import Manifest
from protocol.messages import Decision, Message, StepClose
from protocol.simulation.toy_reference import run_reference
from protocol.simulation.watch import Moved


class LawBrokenError(AssertionError):
    """A law of the project was broken."""


def check_one_history(moves: Iterable[Moved]) -> dict[tuple[int, int], str]:
    """No two nodes ever held different states of one (stage, step); return the states by it."""
    history: dict[tuple[int, int], str] = {}
    for moved in moves:
        known = history.setdefault((moved.stage, moved.step), moved.digest)
        if known != moved.digest:
            raise LawBrokenError(f"two sides advanced: {moved}, but another holds {known[:12]}")
    return history


def check_exactly_once(moves: Iterable[Moved]) -> list[set[int]]:
    """Every stage counted the same slots in a step, each once; return the slots by step."""
    slots: dict[int, set[int]] = {}
    for moved in moves:
        if not moved.counts:
            continue  # nobody's work: the state at the very start
        if any(count not in (0, 1) for count in moved.counts):
            raise LawBrokenError(f"a microbatch was counted {max(moved.counts)} times: {moved}")
        counted = {slot for slot, count in enumerate(moved.counts) if count}
        if len(counted) != moved.num_microbatches:
            raise LawBrokenError(
                f"the mean was over {moved.num_microbatches}, not {len(counted)}: {moved}"
            )
        if slots.setdefault(moved.step - 1, counted) != counted:
            raise LawBrokenError(f"another stage counted other slots: {moved}")
    return [slots[step] for step in sorted(slots)]


def check_shares(committed: Sequence[set[int]], decisions: Iterable[Decision]) -> None:
    """What counted in a step is what the last decision that opened it told data nodes to draw."""
    last: dict[int, Decision] = {}
    for decision in decisions:
        if decision.step not in last or decision.term > last[decision.step].term:
            last[decision.step] = decision
    for step, slots in enumerate(committed):
        shares = {slot for share in last[step].shares for slot in share.slots}
        if slots != shares:
            raise LawBrokenError(f"step {step} counted {sorted(slots)}, not {sorted(shares)}")


def check_law(
    manifest: Manifest,
    moves: Sequence[Moved],
    messages: Iterable[Message] = (),
) -> int:
    """Toy model: states and committed losses are those of one computer, bit for bit.

    Implies the two checks above. ``messages`` may hold the STEP_CLOSEs of the run. Returns the
    number of steps that were applied.
    """
    history, committed = check_one_history(moves), check_exactly_once(moves)
    reference = run_reference(manifest, committed)
    for (stage, step), digest in history.items():
        if step and digest != reference[step - 1].digests[stage]:
            raise LawBrokenError(
                f"stage {stage} is not what one computer computes up to step {step}"
            )
    for close in messages:
        if isinstance(close, StepClose) and close.step < len(reference):
            _check_losses(close, committed[close.step], reference[close.step].losses)
    return len(committed)


def _check_losses(close: StepClose, slots: set[int], losses: dict[int, float]) -> None:
    for entry in close.entries:
        if entry.slot in slots and entry.loss != losses[entry.slot]:
            raise LawBrokenError(
                f"slot {entry.slot} of step {close.step}: loss {entry.loss} is wrong"
            )
