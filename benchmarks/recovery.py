"""What becomes of the loss when stages lose their last holder: CheckFree beside its rivals.

    python benchmarks/recovery.py --log /tmp/recovery.jsonl --write
    python benchmarks/recovery.py --full --log /tmp/recovery.jsonl --write

The log holds each finished run: interrupted, it goes on with the first run that it lacks.
``--report`` runs nothing and makes the page of what the log has (docs/recovery.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from recovery_picture import draw
from recovery_report import report
from recovery_runs import read_log, run_all

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "recovery.md"
PICTURE = ROOT / "docs" / "pictures" / "recovery" / "loss.png"
STEPS, SEEDS = 600, 3
FULL_STEPS, FULL_SEEDS = 3000, 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing, print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="rewrite the page and its picture")
    parser.add_argument("--full", action="store_true", help="3000 steps and five seeds: a day")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--log", type=Path, help="file of finished runs, read and added to")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    steps = options.steps or (FULL_STEPS if options.full else STEPS)
    seeds = options.seeds or (FULL_SEEDS if options.full else SEEDS)
    with TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "recovery.jsonl"
        for record in () if options.report else run_all(log, seeds, steps):
            sys.stderr.write(f"{record['arm']}, seed {record['seed']}: {record['final']:.3f}\n")
        records = read_log(log)
    text = report(records, steps)
    if options.write:
        PAGE.write_text(text)
        PICTURE.parent.mkdir(exist_ok=True)
        draw(PICTURE, records, steps)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
