"""The demo's progress: a live table on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.chaos import Loss
from cli.output import duration, size
from node.status import NodeStatus, StepStatus

_SHOWN_STEPS = 5


@dataclass(frozen=True)
class Snapshot:
    """What the swarm says of itself at one moment."""

    steps: Sequence[StepStatus]
    nodes: Sequence[tuple[str, NodeStatus | None]]
    total_steps: int
    elapsed_s: float
    losses: Sequence[Loss] = ()

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all finished steps."""
        seconds = sum(step.seconds for step in self.steps)
        return sum(step.tokens for step in self.steps) / seconds if seconds else 0.0


class Progress:
    """Shows snapshots; ``to_stderr`` leaves stdout to the result."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(file=sys.stderr if to_stderr else sys.stdout)
        self._live: Live | None = None
        self._num_told = 0
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def tell(self, line: str) -> None:
        """Say one line, above the table if there is one."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """Show what changed."""
        if self._live:
            self._live.update(render(snapshot))
            return
        for step in snapshot.steps[self._num_told :]:
            self.tell(step_line(step, snapshot.total_steps))
        self._num_told = len(snapshot.steps)
        for loss in snapshot.losses:
            for line in loss.untold():
                self.tell(line)


def step_line(step: StepStatus, total: int) -> str:
    """Return one finished step as a line of text."""
    speed = step.tokens / step.seconds if step.seconds else 0.0
    held_out = "" if step.validation_loss is None else f"  validation {step.validation_loss:.3f}"
    loss = "?" if step.loss is None else f"{step.loss:.3f}"
    return f"step {step.step + 1}/{total}  loss {loss}{held_out}  {speed:.0f} tokens/s"


def render(snapshot: Snapshot) -> Group:
    """Return the whole picture: a head line, the last steps, a row per node."""
    done = len(snapshot.steps)
    head = Text(
        f"step {done}/{snapshot.total_steps}   {snapshot.tokens_per_s:.0f} tokens/s   "
        f"{duration(snapshot.elapsed_s)}",
        style="bold",
    )
    tables = [_step_table(snapshot), _node_table(snapshot)]
    if snapshot.losses:
        tables.append(_loss_table(snapshot))
    return Group(head, *tables)


def _loss_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("killed", "stage", "in step", "healed"):
        table.add_column(name)
    for loss in snapshot.losses[-_SHOWN_STEPS:]:
        names = ", ".join(loss.names)
        table.add_row(names, str(loss.stage), str(loss.step + 1), loss.healed or "not yet")
    return table


def _step_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "loss", "validation loss", "tokens/s"):
        table.add_column(name, justify="right")
    for step in snapshot.steps[-_SHOWN_STEPS:]:
        speed = step.tokens / step.seconds if step.seconds else 0.0
        table.add_row(
            str(step.step + 1), _number(step.loss), _number(step.validation_loss), f"{speed:.0f}"
        )
    return table


def _node_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("node")
    for name in ("stage", "committed", "received", "sent"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for name, status in snapshot.nodes:
        table.add_row(name, *_node_cells(status))
    return table


def _node_cells(status: NodeStatus | None) -> tuple[str, ...]:
    if status is None:
        return "", "", "", "", "starting"
    return (
        "" if status.stage is None else str(status.stage),
        str(status.committed_total),
        size(status.bytes_in),
        size(status.bytes_out),
        status.state,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
