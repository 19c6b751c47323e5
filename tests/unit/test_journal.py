"""The node's durable memory: what an authority promised survives, and damage is said."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from step_kit import KEYS, PEERS, decision_of, entry_of

import node.journal
from node.journal import REPORTS_KEPT, FileJournal
from protocol.core.journal import ReportEntry, StepReport
from protocol.errors import ResourceError
from protocol.messages import Accept, Prepare, StepOpen
from protocol.step.consensus import Acceptor
from protocol.step.decision import check_step_open, vote

ROSTER = [PEERS[:2], PEERS[2:4]]


def journal_in(folder: Path, told: list[ResourceError] | None = None) -> FileJournal:
    paths = (folder / "ballot", folder / "decisions.jsonl", folder / "steps.jsonl")
    return FileJournal(*paths, [].append if told is None else told.append)


@pytest.fixture
def journal(tmp_path: Path) -> FileJournal:
    return journal_in(tmp_path)


def accepted() -> StepOpen:
    decision = decision_of(ROSTER, step=3, term=7)
    return StepOpen(step=3, decision=decision, votes=(vote(decision, KEYS[0]),))


def report_of(step: int, loss: float = 1.5) -> StepReport:
    entry = ReportEntry(data_node=PEERS[0], **dict(entry_of(0, PEERS[2:3], loss=loss)))
    return StepReport(
        step=step,
        term=1,
        loss=loss,
        validation_loss=None,
        entries=(entry,),
        roster=(tuple(ROSTER[0]), tuple(ROSTER[1])),
        tokens=8,
        seconds=0.5,
        reissued=0,
    )


def test_at_first_nothing_was_promised(journal: FileJournal) -> None:
    assert journal.load_ballot() == (0, None)


def test_a_ballot_with_its_votes_survives_a_restart(journal: FileJournal, tmp_path: Path) -> None:
    journal.save_ballot(5, None)
    journal.save_ballot(6, accepted())
    promised, message = journal_in(tmp_path).load_ballot()
    assert (promised, message) == (6, accepted())
    check_step_open(message, message.decision.swarm, PEERS[:1])


def test_a_restarted_authority_keeps_its_word(journal: FileJournal, tmp_path: Path) -> None:
    acceptor = Acceptor(KEYS[0], PEERS[:3])
    acceptor.on_prepare(Prepare(step=0, ballot=4), PEERS[1])
    acceptor.on_accept(Accept(step=0, decision=decision_of(ROSTER, ballot=4)), PEERS[1])
    journal.save_ballot(acceptor.promised, acceptor.accepted)
    again = Acceptor(KEYS[0], PEERS[:3], *journal_in(tmp_path).load_ballot())
    assert not again.on_prepare(Prepare(step=0, ballot=3), PEERS[0]).is_granted
    other = decision_of(ROSTER, ballot=4, is_final=True)
    assert again.on_accept(Accept(step=0, decision=other), PEERS[1]).vote is None


def test_a_crash_while_writing_leaves_the_old_ballot(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.save_ballot(5, accepted())

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ResourceError, match="No space left"):
        journal.save_ballot(9, None)
    assert journal_in(tmp_path).load_ballot() == (5, accepted())


def test_the_name_is_synced_as_well_as_the_bytes(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that a power cut undoes would give back what was promised before."""
    synced: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    journal.save_ballot(1, None)
    assert synced == ["ballot.new", tmp_path.name]


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x81\xa8promised", b"\x80", b"{}" * 40])
def test_a_damaged_ballot_is_said_and_not_forgotten(
    journal: FileJournal, tmp_path: Path, damage: bytes
) -> None:
    """An authority that forgets what it promised may sign two decisions of one order."""
    (tmp_path / "ballot").write_bytes(damage)
    with pytest.raises(ResourceError, match="cannot be read") as caught:
        journal.load_ballot()
    assert "backup" in caught.value.hint


def test_a_ballot_that_cannot_be_written_ends_the_node(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot write"):
        journal_in(tmp_path / "gone").save_ballot(1, None)


def test_lines_that_cannot_be_written_are_said_once_until_they_can(tmp_path: Path) -> None:
    told: list[ResourceError] = []
    journal, folder = journal_in(tmp_path / "later", told), tmp_path / "later"
    for step in range(3):
        journal.decided(decision_of(ROSTER, step=step))
        journal.step_finished(report_of(step))
    assert [error.cause.split(":")[0] for error in told] == [
        f"cannot write {folder}/decisions.jsonl"
    ]
    assert len(journal.reports) == 3
    folder.mkdir()
    journal.decided(decision_of(ROSTER, step=3))
    assert journal.last_decision().order == (3, 1)
    assert len(told) == 1


def test_what_was_decided_last_is_known_to_the_next_life(tmp_path: Path) -> None:
    assert journal_in(tmp_path).last_decision() is None
    journal = journal_in(tmp_path)
    for term in (1, 2):
        journal.decided(decision_of(ROSTER, step=5, term=term))
    assert journal_in(tmp_path).last_decision().order == (5, 2)
    with (tmp_path / "decisions.jsonl").open("a") as file:
        file.write('{"step": 6, "te')  # the power went
    assert journal_in(tmp_path).last_decision().order == (5, 2)
    journal_in(tmp_path).decided(decision_of(ROSTER, step=6, term=3))
    assert journal_in(tmp_path).last_decision().order == (6, 3)
    (tmp_path / "decisions.jsonl").rename(tmp_path / "decisions.jsonl.1")
    assert journal_in(tmp_path).last_decision().order == (6, 3)


def test_decisions_and_steps_are_one_line_each(journal: FileJournal, tmp_path: Path) -> None:
    for term in (1, 2):
        journal.decided(decision_of(ROSTER, term=term))
    journal.step_finished(report_of(0))
    decisions = (tmp_path / "decisions.jsonl").read_text().splitlines()
    assert [json.loads(line)["term"] for line in decisions] == [1, 2]
    (line,) = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert StepReport.model_validate_json(line) == report_of(0)
    (status,) = journal.reports
    assert (status.step, status.loss, status.tokens, status.committed) == (0, 1.5, 8, 1)


def test_the_last_losses_of_an_earlier_life_are_known(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    assert (journal.last_step, journal.last_validation) == (None, None)
    journal.step_finished(report_of(3).model_copy(update={"validation_loss": 2.5}))
    for step, loss in ((4, 1.25), (5, float("nan"))):
        journal.step_finished(report_of(step, loss))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "te')  # the power went
    for life in (journal, journal_in(tmp_path)):
        assert life.last_step is not None
        assert life.last_step.step == 5
        assert life.last_validation is not None
        assert (life.last_validation.step, life.last_validation.validation_loss) == (3, 2.5)
    assert not life.reports  # `steps` tells of this life
    (tmp_path / "steps.jsonl").rename(tmp_path / "steps.jsonl.1")
    again = journal_in(tmp_path).last_step
    assert again is not None
    assert again.step == 5


def test_files_and_memory_are_bounded(
    journal: FileJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node lives for months: what it keeps of each step must not fill the disk."""
    monkeypatch.setattr(node.journal, "MAX_FILE_BYTES", 4096)
    for step in range(2 * REPORTS_KEPT):
        journal.step_finished(report_of(step))
        journal.decided(decision_of(ROSTER, step=step))
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {f"{n}.jsonl{old}" for n in ("steps", "decisions") for old in ("", ".1")}
    assert max(sizes.values()) <= 4096
    assert len(journal.reports) == REPORTS_KEPT
    kept = (tmp_path / "steps.jsonl.1").read_text() + (tmp_path / "steps.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in kept.splitlines()]
    assert steps == list(range(steps[0], 2 * REPORTS_KEPT))
