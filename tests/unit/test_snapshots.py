"""Snapshots on files: whole or not there, few, within a quota; and what Keeper makes of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import trio
from core_kit import KEYS, PEERS, Bench, bench_of
from stages_kit import make_blocks, make_manifest
from step_kit import decision_of

from node import snapshots as module
from node.snapshots import FileSnapshots
from protocol.core.keeper import Keeper
from protocol.errors import ResourceError, StateMismatch
from protocol.ports import StateView

STAGE = 1
ME, PEER = PEERS[2:4]


def view_of(step: int, num_bytes: int = 100) -> StateView:
    head, body = torch.tensor([step], dtype=torch.uint8), torch.full((num_bytes,), step).byte()
    digest = sha256(bytes(head.numpy()) + bytes(body.numpy())).hexdigest()
    return step, digest, (head, body)


def steps_of(folder: Path, suffix: str = ".safetensors") -> list[int]:
    return sorted(int(path.name.split("-")[3]) for path in folder.glob(f"*{suffix}"))


def newest(store: FileSnapshots) -> str | None:
    return next((digest for _, digest in store.decided(STAGE)), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


async def save(store: FileSnapshots, *steps: int, is_decided: bool = True) -> None:
    for step in steps:
        await store.save(STAGE, view_of(step), is_decided=is_decided)


# --- files ---------------------------------------------------------------------------------


async def test_what_was_saved_is_found_again_by_another_process(folder: Path) -> None:
    await save(FileSnapshots(folder, 2), 3)
    _, digest, pieces = view_of(3)
    again = FileSnapshots(folder, 2)
    assert newest(again) == digest
    assert not again.decided(STAGE + 1)
    assert again.is_decided(digest)
    assert torch.equal(await again.load(digest), torch.cat(pieces))
    assert oct(folder.stat().st_mode)[-3:] == "700"


async def test_the_last_few_are_kept(folder: Path) -> None:
    store = FileSnapshots(folder, 2)
    await save(store, 1, 2, 3, 4)
    assert steps_of(folder) == [3, 4]
    assert not store.holds(view_of(2)[1])


async def test_a_prepared_state_is_given_out_by_its_digest_alone(folder: Path) -> None:
    store = FileSnapshots(folder, 2)
    await save(store, 4)
    await save(store, 5, is_decided=False)
    digest = view_of(5)[1]
    assert newest(store) == view_of(4)[1]
    assert store.holds(digest)
    assert not store.is_decided(digest)
    await store.decide(digest)
    assert newest(FileSnapshots(folder, 2)) == digest
    assert steps_of(folder, ".prepared") == []


async def test_prepared_states_that_came_to_nothing_go(folder: Path) -> None:
    store = FileSnapshots(folder, 2)
    await save(store, 5, is_decided=False)
    await store.save(STAGE, view_of(5, num_bytes=7), is_decided=True)
    assert steps_of(folder, ".prepared") == []


async def test_a_write_that_was_cut_off_leaves_nothing(folder: Path) -> None:
    await save(FileSnapshots(folder, 2), 1)
    name = f"stage-1-step-2-{view_of(2)[1]}"
    (folder / f"{name}.new").write_bytes(b"half")
    again = FileSnapshots(folder, 2)
    assert not again.holds(view_of(2)[1])
    assert not list(folder.glob("*.new"))


async def test_numbers_that_changed_while_they_were_written_are_no_snapshot(folder: Path) -> None:
    store = FileSnapshots(folder, 2)
    await save(store, 1)
    step, digest, (head, body) = view_of(2)
    with pytest.raises(StateMismatch) as caught:
        await store.save(STAGE, (step, digest, (head, body + 1)), is_decided=True)
    assert "snapshot_steps" in caught.value.hint
    assert [path.name.split("-")[3] for path in folder.iterdir()] == ["1"]


async def test_a_full_disk_leaves_the_old_snapshot(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileSnapshots(folder, 1)
    await save(store, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        with pytest.raises(ResourceError, match="No space left") as caught:
            await save(store, 2)
    assert "Free disk space" in caught.value.hint
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    assert newest(store) == view_of(1)[1]
    await save(store, 3)
    assert steps_of(folder) == [3]


async def test_a_place_where_no_directory_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"cannot (read|write)"):
        await save(FileSnapshots(tmp_path / "file" / "snapshots", 1), 1)


async def test_the_quota_holds_and_the_last_one_is_never_given_for_it(folder: Path) -> None:
    size = sum(piece.nbytes for piece in view_of(1)[2])
    store = FileSnapshots(folder, 3, quota_bytes=2 * size)
    await save(store, 1, 2, 3)
    assert steps_of(folder) == [2, 3]
    small = FileSnapshots(folder, 3, quota_bytes=2 * size - 1)
    with pytest.raises(ResourceError, match="snapshot_quota_bytes") as caught:
        await save(small, 4)
    assert "Raise" in caught.value.hint
    assert newest(small) == view_of(3)[1]


async def test_what_is_set_aside_is_kept_for_a_look_and_never_given_out(folder: Path) -> None:
    store = FileSnapshots(folder, 3)
    await save(store, 1, 2, 3)
    for step in (2, 3):
        await store.set_aside(view_of(step)[1])
    assert newest(store) == view_of(1)[1]
    assert newest(FileSnapshots(folder, 3)) == view_of(1)[1]
    assert steps_of(folder, ".damaged") == [3]


# --- when ----------------------------------------------------------------------------------


class Kept:
    """A holder's keeper on real files, whose stage steps when a test says so."""

    def __init__(self, bench: Bench, store: FileSnapshots, every: int) -> None:
        self.bench, self.store = bench, store
        self.keeper = Keeper(bench.ctx, store, every)

    def prepare(self, by: float = 1.0) -> str:
        state = self.bench.state
        return state.prepare(torch.full((state.num_gradients,), by), 1)

    async def step(self, *, is_alone: bool = False) -> None:
        """One step of the swarm, as closing and holding go through it."""
        state = self.bench.state
        self.prepare()
        decision = decision_of(
            [PEERS[:2], (ME,) if is_alone else (ME, PEER), (PEERS[4],)], step=state.step
        )
        await self.keeper.keep_prepared(decision)
        state.apply()
        self.keeper.on_state(decision)
        for _ in range(20):
            await trio.testing.wait_all_tasks_blocked(0.001)


@pytest.fixture
def make(nursery: trio.Nursery, folder: Path) -> Callable[[int], Kept]:
    def make(every: int) -> Kept:
        bench = bench_of(nursery, KEYS[2], STAGE, costs=dict.fromkeys(("state",), 0.0))
        kept = Kept(bench, FileSnapshots(folder, 9), every)
        nursery.start_soon(kept.keeper.run)
        return kept

    return make


async def test_holders_write_every_so_many_steps(make: Callable[[int], Kept], folder: Path) -> None:
    kept = make(2)
    for _ in range(5):
        await kept.step()
    assert steps_of(folder) == [2, 4]


async def test_whoever_is_alone_in_its_stage_writes_before_it_promises(
    make: Callable[[int], Kept], folder: Path
) -> None:
    kept = make(100)
    digest = kept.prepare()
    await kept.keeper.keep_prepared(decision_of([PEERS[:2], (ME,), (PEERS[4],)]))
    assert kept.store.holds(digest)
    assert steps_of(folder, ".prepared") == [1]
    for _ in range(2):
        await kept.step(is_alone=True)
    assert steps_of(folder)[-1] == 2


async def test_with_0_nothing_is_written_even_at_the_end(
    make: Callable[[int], Kept], folder: Path
) -> None:
    kept = make(0)
    await kept.step(is_alone=True)
    await kept.keeper.save_all()
    assert not folder.exists()


async def test_a_clean_stop_writes_the_state_and_what_is_prepared(
    make: Callable[[int], Kept], folder: Path
) -> None:
    kept = make(100)
    await kept.step()
    digest = kept.prepare()
    await kept.keeper.save_all()
    assert steps_of(folder) == [1]
    assert kept.store.holds(digest)


async def test_a_failure_is_told_once_and_training_goes_on(
    make: Callable[[int], Kept], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = make(1)
    await kept.step()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        for _ in range(3):
            await kept.step()
    assert kept.bench.state.step == 4
    told = list(kept.bench.observer._trace.find("snapshot_not_saved"))
    assert len(told) == 1
    assert dict(told[0].details)["code"] == "resource"
    assert "No space left" in str(dict(told[0].details)["cause"])
    await kept.step()
    assert steps_of(folder) == [1, 5]


# --- again ---------------------------------------------------------------------------------


async def test_a_node_begins_with_its_newest_whole_snapshot(
    make: Callable[[int], Kept], folder: Path
) -> None:
    before = make(1)
    for _ in range(3):
        await before.step()
    newest = next(folder.glob("stage-1-step-3-*"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    after = make(1)
    await after.keeper.load_newest()
    assert after.bench.state.step == 2
    event = next(after.bench.observer._trace.find("snapshot_damaged"))
    assert dict(event.details)["code"] == "state_mismatch"
    assert steps_of(folder, ".damaged") == [3]


async def test_a_decided_state_is_taken_from_the_disk_by_its_digest(
    make: Callable[[int], Kept], folder: Path
) -> None:
    before = make(100)
    await before.step()
    digest = before.prepare()
    await before.keeper.save_all()
    after = make(100)
    assert await after.keeper.load(digest)
    assert (after.bench.state.step, after.bench.state.digest) == (2, digest)
    assert not await after.keeper.load("0" * 64)


async def test_a_snapshot_of_another_swarm_is_set_aside_and_an_older_one_taken(
    make: Callable[[int], Kept], folder: Path
) -> None:
    kept = make(1)
    mine, foreign = (make_blocks(make_manifest(training={"seed": seed}))[0] for seed in (1, 2))
    kept.bench.ctx.state = mine
    for step, stage in ((1, mine), (2, foreign)):
        while stage.step < step:
            stage.prepare(torch.ones(stage.num_gradients), 1)
            stage.apply()
        await kept.store.save(STAGE, stage.view_state(), is_decided=True)
    kept.bench.ctx.state = again = make_blocks(make_manifest(training={"seed": 1}))[0]
    await kept.keeper.load_newest()
    assert (again.step, again.digest) == (1, mine.digest)
    event = next(kept.bench.observer._trace.find("snapshot_damaged"))
    assert "another swarm" in str(dict(event.details)["cause"])
    assert steps_of(folder, ".damaged") == [2]


async def test_what_all_stages_write_outlives_the_steps_that_one_writes_alone(
    folder: Path,
) -> None:
    """A swarm goes back to a step that every stage has."""
    store = FileSnapshots(folder, 2, every=4)
    await save(store, *range(1, 14))
    assert [step for step, _ in store.decided(STAGE)] == [13, 12, 8]
    assert [step for step, _ in FileSnapshots(folder, 2, every=4).decided(STAGE)] == [13, 12, 8]


async def test_after_going_back_the_older_step_is_the_last_one(folder: Path) -> None:
    store = FileSnapshots(folder, 2, every=4)
    await save(store, 4, 7, 8, 11)
    await save(store, 5, is_decided=False)
    await store.decide(view_of(5)[1])
    for known in (store, FileSnapshots(folder, 2, every=4)):
        assert newest(known) == view_of(5)[1]
    await save(store, 6)
    assert [step for step, _ in store.decided(STAGE)] == [6, 8, 4]
