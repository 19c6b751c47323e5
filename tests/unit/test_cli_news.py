"""What `shoal join` and `shoal swarm run` tell while a daemon runs and when it ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cli import foreground
from cli.foreground import News
from node.paths import StatePaths
from node.status import NodeStatus, Problem
from node.totals import Work


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def at_step(step: int, loss: float | None = None) -> NodeStatus:
    return NodeStatus(
        peer_id="p", swarm="s", name="n", role="data", stage=0, state="training",
        step=step, loss=loss,
    )  # fmt: skip


def told(news: News, capsys: pytest.CaptureFixture[str]) -> str:
    for name, fields in news.look():
        foreground._tell_text(name, fields)
    return capsys.readouterr().out


def test_progress_is_told_every_ten_seconds_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, answers = Clock(), iter([at_step(1), at_step(2), at_step(3, 2.5), at_step(3)])
    news = News(StatePaths(tmp_path), lambda: next(answers), clock)
    assert told(news, capsys) == "training: stage 0, step 1, swarm n\n"
    clock.now = 9.9
    assert told(news, capsys) == ""
    clock.now = 10.0
    assert told(news, capsys) == "training: stage 0, step 3, loss 2.500\n"
    clock.now = 30.0
    assert told(news, capsys) == ""


def test_a_loss_that_is_no_number_is_told_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, answers = Clock(), iter([at_step(1), at_step(2, float("nan"))])
    news = News(StatePaths(tmp_path), lambda: next(answers), clock)
    told(news, capsys)
    clock.now = 10.0
    assert told(news, capsys) == "training: stage 0, step 2, loss nan\n"


@pytest.mark.parametrize(
    ("returncode", "how", "status"),
    [(-signal.SIGKILL, "by signal SIGKILL", 137), (70, "with status 70", 70)],
)
def test_a_bad_end_is_told_with_the_place_of_the_log(
    returncode: int, how: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert foreground._told_end(returncode, StatePaths(tmp_path)) == status
    assert capsys.readouterr().err == f"the node ended {how}; its log is {tmp_path}/log.jsonl\n"


def test_a_good_end_needs_no_place_of_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert foreground._told_end(0, StatePaths(tmp_path)) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("returncode", "word"),
    [
        (0, "left cleanly"), (143, "stopped before its work was handed over"),
        (-9, "ended"), (6, "ended"),
    ],
)  # fmt: skip
def test_the_last_word_tells_what_the_run_came_to(
    returncode: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = Work(microbatches=5, steps=2), Work(microbatches=17, steps=5)
    foreground._tell_text("ended", foreground._end_of(returncode, before, after))
    assert capsys.readouterr().out == (
        f"{word}: 12 microbatches of this run count, in 3 steps; 17 of all runs\n"
    )


def test_a_problem_is_told_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(code="resource", text="the port is taken", hint="Free it.", at=1.0)
    status = at_step(1).model_copy(update={"last_problem": problem})
    foreground._tell_text("state", status.model_dump(mode="json"))
    assert capsys.readouterr().err == "problem[resource]: the port is taken\nremedy: Free it.\n"
