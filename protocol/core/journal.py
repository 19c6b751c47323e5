"""What a node writes down before it speaks (an authority's promises) and what it reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from protocol.keys import PeerId
from protocol.messages import Decision, Entry, StepOpen


class ReportEntry(Entry):
    """A committed microbatch and the data node that drew it."""

    data_node: PeerId


class StepReport(BaseModel):
    """One finished step, as every data node knows it from the closes."""

    model_config = ConfigDict(frozen=True)

    step: int
    term: int
    loss: float
    validation_loss: float | None
    entries: tuple[ReportEntry, ...]
    roster: tuple[tuple[PeerId, ...], ...]
    tokens: int
    seconds: float
    reissued: int


class Journal(Protocol):
    """Durable memory of one node. Synchronous and small; a ballot that is not saved ends it."""

    def save_ballot(self, promised: int, accepted: StepOpen | None) -> None:
        """Make an authority's memory durable before its answer leaves."""
        ...

    def load_ballot(self) -> tuple[int, StepOpen | None]:
        """Return what was saved last, (0, None) at first."""
        ...

    def decided(self, decision: Decision) -> None:
        """Note a decision that this node obeys."""
        ...

    def last_decision(self) -> Decision | None:
        """The decision that was noted last, in an earlier life too."""
        ...

    def past_decisions(self) -> Iterator[Decision]:
        """Decisions that were noted, in earlier lives too, the newest first; not all are kept."""
        ...

    def step_finished(self, report: StepReport) -> None:
        """Note a finished step (data nodes only)."""
        ...


@dataclass
class MemoryJournal:
    """A journal that lives as long as the object: for simulation and tests."""

    ballot: tuple[int, StepOpen | None] = (0, None)
    decisions: list[Decision] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)

    def save_ballot(self, promised: int, accepted: StepOpen | None) -> None:
        """Keep the ballot in memory."""
        self.ballot = (promised, accepted)

    def load_ballot(self) -> tuple[int, StepOpen | None]:
        """Return the ballot kept in memory."""
        return self.ballot

    def decided(self, decision: Decision) -> None:
        """Keep the decision in memory."""
        self.decisions.append(decision)

    def last_decision(self) -> Decision | None:
        """The last decision kept in memory."""
        return self.decisions[-1] if self.decisions else None

    def past_decisions(self) -> Iterator[Decision]:
        """The decisions kept in memory, the newest first."""
        return reversed(self.decisions)

    def step_finished(self, report: StepReport) -> None:
        """Keep the report in memory."""
        self.reports.append(report)
