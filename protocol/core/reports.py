"""What a data node can say of a finished step: all closes, and so the mean loss."""

from __future__ import annotations

import math

import trio

from protocol.core.context import Context
from protocol.core.data_flow import DataFlow
from protocol.core.journal import ReportEntry, StepReport
from protocol.core.member_step import MemberStep


def step_report(ctx: Context, member: MemberStep, flow: DataFlow) -> StepReport:
    """Summarise a step from the closes that counted in it."""
    decision = member.decision
    expected = member.ledger.expected(decision)
    entries = tuple(
        ReportEntry(data_node=peer, **dict(entry))
        for (peer, _), entry in sorted(expected.items(), key=lambda item: item[0])
    )
    loss = math.fsum(e.loss for e in entries) / len(entries)
    seconds = trio.current_time() - member.started_at
    ctx.observer.gauge("loss", loss)
    return StepReport(
        step=decision.step,
        term=decision.term,
        loss=loss,
        validation_loss=flow.forward_only.validation_loss,
        entries=entries,
        roster=decision.roster,
        tokens=len(entries) * flow.tokens_per_microbatch,
        seconds=seconds,
        reissued=flow.num_reissued,
    )
