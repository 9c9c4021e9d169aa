"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.export import MARK, ExportMark, whole_folder
from megatron_ft.checkpoint.source import OpenSnapshot, SnapshotInfo
from megatron_ft.core.errors import SnapshotUnavailableError
from megatron_ft.core.identity import SnapshotId

JOB, OTHER = uuid.UUID(int=1 << 120), uuid.UUID(int=2 << 120)


def snapshot(job: uuid.UUID = JOB, refusal: str = "") -> OpenSnapshot:
    def check() -> None:
        if refusal:
            raise SnapshotUnavailableError(refusal)

    return OpenSnapshot(SnapshotInfo(SnapshotId(1, 1), 20, "durable"), job, (), {}, check)


class Synced(DiskCalls):
    """Which files and folders were synced, and which of those that it renames were not."""

    def __init__(self) -> None:
        self.synced: set[int] = set()
        self.forgotten: list[Path] = []

    def sync(self, descriptor: int) -> None:
        super().sync(descriptor)
        self.synced.add(os.fstat(descriptor).st_ino)

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.synced.add(folder.stat().st_ino)

    def rename(self, old: Path, new: Path) -> None:
        below = [old, *old.rglob("*")]
        self.forgotten = [path for path in below if path.stat().st_ino not in self.synced]
        super().rename(old, new)


def test_all_that_was_written_is_durable_before_it_has_its_name(tmp_path: Path) -> None:
    """Megatron syncs the tensors' files, and not those beside them."""
    disk = Synced()
    with whole_folder(tmp_path / "iter_20", snapshot(), disk) as partial:
        (partial / "deep" / "er").mkdir(parents=True)
        for name in ("common.pt", "deep/metadata.json", "deep/er/file"):
            (partial / name).write_text("content")
    assert not disk.forgotten
    assert tmp_path.stat().st_ino in disk.synced
    assert [path.name for path in tmp_path.iterdir()] == ["iter_20"]


def test_two_jobs_that_export_one_iteration_do_not_mix(tmp_path: Path) -> None:
    folder = tmp_path / "iter_20"
    with ExitStack() as later:
        first = later.enter_context(whole_folder(folder, snapshot()))
        (first / "first").touch()
        with whole_folder(folder, snapshot(OTHER)) as second:
            (second / "second").touch()
        with pytest.raises(OSError, match="not empty"):
            later.close()
    assert {path.name for path in folder.iterdir()} == {MARK, "second"}
    assert ExportMark.of(folder) == ExportMark(OTHER, SnapshotId(1, 1), folder.name)
    assert list(tmp_path.iterdir()) == [folder]


def test_nothing_is_left_of_what_was_refused(tmp_path: Path) -> None:
    with pytest.raises(SnapshotUnavailableError, match="given up"):
        with whole_folder(tmp_path / "iter_20", snapshot(refusal="it was given up")) as partial:
            (partial / "file").touch()
    assert not list(tmp_path.iterdir())
