"""Snapshots on real file systems that are full, or that nobody may write to."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import torch
from mounts import fill, make_read_only, mounted

from node.snapshots import FileSnapshots
from protocol.errors import ResourceError
from protocol.ports import StateView

STAGE = 1


def view_of(step: int, num_bytes: int = 80 * 1024) -> StateView:
    data = torch.full((num_bytes,), step).byte()
    return step, sha256(data.numpy().tobytes()).hexdigest(), (data,)


async def holds_whole(store: FileSnapshots, step: int) -> bool:
    _, digest, (data,) = view_of(step)
    found = await store.load(digest)
    return found is not None and torch.equal(found, data)


async def test_a_full_disk_costs_the_new_snapshot_and_no_old_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk):
        store = FileSnapshots(disk / "snapshots", 9)
        await store.save(STAGE, view_of(1), is_decided=True)
        fill(disk)
        for is_decided in (True, False):
            with pytest.raises(ResourceError, match="No space left on device") as caught:
                await store.save(STAGE, view_of(2), is_decided=is_decided)
            assert "Free disk space" in caught.value.hint
        assert [path.suffix for path in (disk / "snapshots").iterdir()] == [".safetensors"]
        for known in (store, FileSnapshots(disk / "snapshots", 9)):
            assert [step for step, _ in known.decided(STAGE)] == [1]
            assert await holds_whole(known, 1)
        (disk / "full").unlink()
        await store.save(STAGE, view_of(2), is_decided=True)
        assert await holds_whole(store, 2)


async def test_a_quota_below_the_disks_room_keeps_it_from_being_filled(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk):
        store = FileSnapshots(disk / "snapshots", 9, quota_bytes=170 * 1024)
        for step in range(1, 6):
            await store.save(STAGE, view_of(step), is_decided=True)
        assert [step for step, _ in store.decided(STAGE)] == [5, 4]


async def test_a_read_only_disk_is_named_and_still_read(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with mounted(disk):
        before = FileSnapshots(disk / "snapshots", 9)
        await before.save(STAGE, view_of(1), is_decided=True)
        await before.save(STAGE, view_of(2), is_decided=False)
        make_read_only(disk)
        store = FileSnapshots(disk / "snapshots", 9)
        with pytest.raises(ResourceError, match="Read-only file system"):
            await store.save(STAGE, view_of(3), is_decided=True)
        with pytest.raises(ResourceError, match="Read-only file system"):
            await store.decide(view_of(2)[1])
        assert await holds_whole(store, 1)
        assert await holds_whole(store, 2)
        await store.set_aside(view_of(1)[1])  # it cannot be renamed, and does not count any more
        assert not store.holds(view_of(1)[1])
