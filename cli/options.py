"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        help="Directory of the node's key, settings and logs.",
        envvar="SHOAL_STATE",
        file_okay=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DataOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--data",
        help="Text file, folder or .jsonl to train on (may be repeated); "
        "by default the sources of Python's standard library.",
        exists=True,
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1, ...")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", help="CPU threads to compute with.", min=1)
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        "--metrics-port", help="Loopback port of /metrics; 0 for a free one.", min=0, max=65535
    ),
]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="Memory to use at most, such as 4GiB.")
]
