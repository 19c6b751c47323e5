"""Where output goes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta

_LINE_CHARS = 100
_GAP = "  "


def say(text: str) -> None:
    """Tell the person something beside the result."""
    print(text, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Print a result."""
    print(text, flush=True)


def emit_json(value: object) -> None:
    """Print a result as one line of JSON."""
    emit(json.dumps(value, sort_keys=False, allow_nan=False))


def facts(pairs: Mapping[str, object]) -> str:
    """Return ``name  value`` lines with the names aligned."""
    width = max(map(len, pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs.items())


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return left-aligned columns under their heads; long cells are cut to keep lines short."""
    cells = [[str(head) for head in heads], *([str(cell) for cell in row] for row in rows)]
    widths = _fitting([max(map(len, column)) for column in zip(*cells, strict=True)])
    lines = (
        _GAP.join(f"{_cut(c, w):<{w}}" for c, w in zip(row, widths, strict=True)) for row in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _fitting(widths: list[int]) -> list[int]:
    """Narrow the widest columns until a line has no more than _LINE_CHARS characters."""
    fitting = list(widths)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - _LINE_CHARS
    for _ in range(excess):
        fitting[fitting.index(max(fitting))] -= 1
    return fitting


def _cut(text: str, width: int) -> str:
    """Leave out the middle: a path tells most at its end, a PeerID differs there alone."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def printable(text: str) -> str:
    """Return ``text`` without what could steer a terminal: a model may write any byte."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def size(num_bytes: float) -> str:
    """Return a number of bytes as people write it (powers of 1024)."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.0f} {units[power]}" if power == 0 else f"{num_bytes:.1f} {units[power]}"


def duration(seconds: float) -> str:
    """Return a time span to the second, as ``h:mm:ss``."""
    return str(timedelta(seconds=round(seconds)))
