"""`shoal demo` as a person runs it: real nodes, no terminal, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

MARK = "TEST_DEMO_OF_SHOAL"
SMALL = ("--layers", "3", "--width", "32", "--context", "32", "--quota", "4", "--microbatch", "2")
KEYS = [
    "steps",
    "loss_first",
    "loss_last",
    "val_loss",
    "unigram_entropy",
    "bigram_entropy",
    "tokens_per_s",
    "committed",
    "reissued",
    "seconds_to_first_commit",
    "leftover_processes",
]


@contextmanager
def demo(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run `shoal demo`; afterwards nothing that descends from it may live."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", "from cli.main import main; main()", "demo", *SMALL, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
    ) as process:
        try:
            yield process
        finally:
            process.kill()
    # A demo that was killed could not wait for its nodes: give them the time to notice.
    _, alive = psutil.wait_procs(marked(mark), timeout=8)
    assert alive == []


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that inherited the demo's environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the progress up to a line with ``text``; fail if it ends before."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if text in line:
            return seen
    pytest.fail(f"{text!r} is not in {seen!r}")


@pytest.mark.timeout(420)
def test_demo_trains_and_says_how_it_went(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"the number {number} follows {number - 1}. " * 40)
    keep = tmp_path / "d"
    with demo("--steps", "4", "--data", str(text), "--keep", str(keep), "--json") as process:
        output, progress = process.communicate(timeout=400)
    assert process.returncode == 0, progress
    answer = json.loads(output.splitlines()[-1])
    assert list(answer) == KEYS
    assert answer["steps"] == 4
    assert answer["committed"] == 16
    assert answer["leftover_processes"] == 0
    assert answer["loss_last"] < answer["loss_first"]
    assert 0 < answer["bigram_entropy"] < answer["unigram_entropy"] < 5.55
    assert answer["val_loss"] > 0
    assert answer["tokens_per_s"] > 0
    assert answer["seconds_to_first_commit"] > 0
    assert "step 4/4  loss " in progress
    assert (keep / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert_weights(keep)


def assert_weights(keep: Path) -> None:
    """Every node saved its own stage alone, and the two holders of one saved the same bits."""
    for stage in (1, 2, 3):
        first, second = (weights(keep / f"stage-{stage}-{letter}") for letter in "ab")
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        layers = {name.split(".")[2] for name in first if ".layers." in name}
        assert layers == {str(stage - 1)}
    assert not [name for name in weights(keep / "data-1") if ".layers." in name]


def weights(node: Path) -> dict[str, torch.Tensor]:
    (file,) = (node / "weights").glob("*.safetensors")
    return load_file(file)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["starting the organiser", "starting 6 more nodes", "step 1/"])
def test_ctrl_c_ends_it_cleanly(moment: str, tmp_path: Path) -> None:
    with demo("--steps", "500", "--keep", str(tmp_path / "d"), "--json") as process:
        read_until(process, moment)
        process.send_signal(signal.SIGINT)
        output, told = process.communicate(timeout=100)
    assert process.returncode == 130
    assert output == ""
    assert " of 500 steps were done" in told
    assert "weights: " in told
    assert f"logs and keys: {tmp_path / 'd'}" in told
    assert "Traceback" not in told


@pytest.mark.timeout(300)
def test_a_killed_demo_takes_its_nodes_along(tmp_path: Path) -> None:
    with demo("--keep", str(tmp_path / "d"), "--json") as process:
        read_until(process, "starting 6 more nodes")
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children
