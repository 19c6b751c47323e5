"""Looking for what keeps a node from working: `shoal doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from cli.options import JsonOption, StateOption
from cli.output import emit, emit_json
from node.paths import state_paths

if TYPE_CHECKING:
    from node.doctor import Finding


def doctor(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Check this computer and the node's directory, and change nothing."""
    from node.doctor import examine

    findings = []
    for finding in examine(state_paths(state)):
        findings.append(finding)
        if not as_json:
            emit(_line(finding))
    if as_json:
        emit_json([asdict(finding) for finding in findings])
    raise typer.Exit(int(any(finding.mark == "error" for finding in findings)))


def _line(finding: Finding) -> str:
    line = f"{finding.mark:<7}  {finding.check:<9}  {finding.cause}"
    return f"{line}\n{'':<20}remedy: {finding.remedy}" if finding.remedy else line
