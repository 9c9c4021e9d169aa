"""Which exports of drained snapshots stay, and which are withdrawn."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.checkpoint.export import MARK, ExportMark, partial_of
from megatron_ft.checkpoint.export_drained import Exported, given_up, is_ours, tidy, withdraw
from megatron_ft.checkpoint.native import (
    LATEST,
    TRACKER,
    checkpoint_folder,
    newest_checkpoint,
    point_tracker,
)
from megatron_ft.core.errors import ExportError
from megatron_ft.core.identity import Ancestor, SnapshotId

JOB = uuid.UUID(int=7)
ROLLED_BACK = (Ancestor(1, None), Ancestor(3, SnapshotId(1, 6)))
"""Incarnation 3 went back to the sixth snapshot of incarnation 1; all of incarnation 2 was given
up."""


def exported(iteration: int, snapshot: SnapshotId, directory: Path = Path()) -> Exported:
    return Exported(snapshot, checkpoint_folder(directory, iteration))


@pytest.mark.parametrize(
    ("snapshot", "iteration", "gone"),
    [
        (SnapshotId(1, 6), 60, False),
        (SnapshotId(1, 7), 70, True),
        (SnapshotId(2, 1), 100, True),
        (SnapshotId(2, 1), 64, False),
        (SnapshotId(3, 1), 70, False),
        (SnapshotId(4, 1), 100, False),
    ],
)
def test_what_is_to_come_once_more_is_given_up(
    snapshot: SnapshotId, iteration: int, gone: bool
) -> None:
    one = exported(iteration, snapshot)
    assert given_up([one], 65, ROLLED_BACK) == [one] * gone
    assert given_up([one], 65, ()) == []


def plan_of(directory: Path, iteration: int) -> DrainPlan:
    snapshot = SnapshotId(3, 1)
    return DrainPlan(JOB, snapshot, iteration, "protected", ROLLED_BACK, directory, 1)


def have_exports(directory: Path, *known: tuple[int, SnapshotId]) -> list[Path]:
    """Each whole, the last one announced."""
    folders = []
    for iteration, snapshot in known:
        folder = checkpoint_folder(directory, iteration)
        folder.mkdir()
        (folder / "data").touch()
        (folder / MARK).write_bytes(msgspec.json.encode(ExportMark(JOB, snapshot, folder.name)))
        point_tracker(directory, iteration)
        folders.append(folder)
    return folders


WRITER: Any = SimpleNamespace(announce=point_tracker)


def test_an_export_of_what_was_rolled_back_is_not_loaded_again(tmp_path: Path) -> None:
    snapshots = SnapshotId(1, 6), SnapshotId(2, 1), SnapshotId(2, 3)
    own = checkpoint_folder(tmp_path, 90)
    own.mkdir()
    kept, *_ = have_exports(tmp_path, *zip((60, 80, 100), snapshots, strict=True))
    withdraw(plan_of(tmp_path, 70), tmp_path, WRITER)
    assert set(tmp_path.iterdir()) == {own, kept, tmp_path / TRACKER}
    assert newest_checkpoint(tmp_path) == kept


def test_nothing_is_announced_where_nothing_is_left(tmp_path: Path) -> None:
    have_exports(tmp_path, (100, SnapshotId(2, 3)))
    (tmp_path / LATEST).write_text("iter_0000100")
    withdraw(plan_of(tmp_path, 100), tmp_path, WRITER)
    assert not list(tmp_path.iterdir())
    point_tracker(tmp_path, 70)
    assert (tmp_path / TRACKER).read_text() == "70"


def test_what_is_on_the_lineage_stays_as_it_is(tmp_path: Path) -> None:
    have_exports(tmp_path, (60, SnapshotId(1, 6)), (100, SnapshotId(3, 1)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    withdraw(plan_of(tmp_path, 70), tmp_path, WRITER)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_export_of_another_job_is_none_of_this_one(tmp_path: Path) -> None:
    (one,) = have_exports(tmp_path, (60, SnapshotId(1, 6)))
    assert is_ours(one, JOB)
    assert not is_ours(tmp_path / "iter_0000070", JOB), "the framework's own"
    with pytest.raises(ExportError, match=f"exported by another job .{JOB}.*--drain-export-dir"):
        is_ours(one, uuid.UUID(int=8))
    (one / MARK).write_text("{")
    assert not is_ours(one, JOB), "a damaged mark is none"


def test_only_the_newest_exports_stay_and_nothing_that_is_not_the_jobs(tmp_path: Path) -> None:
    """Neither what links lead to, nor the framework's own checkpoints, nor another job's."""
    elsewhere, exports = tmp_path / "elsewhere", tmp_path / "exports"
    for folder in (elsewhere, exports):
        folder.mkdir()
    (linked,) = have_exports(elsewhere, (1, SnapshotId(1, 1)))
    (exports / "iter_0000001").symlink_to(linked)
    (exports / "iter_0000002").mkdir()
    made = have_exports(exports, *((n, SnapshotId(1, n)) for n in (3, 4, 5)))
    tidy(exports, uuid.UUID(int=8 << 96), 1)
    assert all(folder.is_dir() for folder in made)
    tidy(exports, JOB, 2)
    left = {path.name for path in exports.iterdir()} - {TRACKER}
    assert left == {"iter_0000001", "iter_0000002", "iter_0000004", "iter_0000005"}
    assert (linked / "data").exists()


def test_what_a_killed_export_wrote_does_not_stay(tmp_path: Path) -> None:
    _, killed, newest = have_exports(tmp_path, *((n, SnapshotId(1, n)) for n in (1, 2, 3)))
    others = partial_of(killed, uuid.UUID(int=1 << 120))
    part = killed.rename(partial_of(killed, JOB))
    others.mkdir()
    tidy(tmp_path, JOB, 1)
    assert part.exists(), "somebody may write it now"
    for path in (*part.iterdir(), part):
        os.utime(path, (0.0, 0.0))
    tidy(tmp_path, JOB, 1)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {newest, others}


def test_a_copy_and_a_renamed_export_are_the_users_own(tmp_path: Path) -> None:
    first, second, newest = have_exports(tmp_path, *((n, SnapshotId(1, n)) for n in (1, 2, 3)))
    shutil.copytree(first, copy := tmp_path / "copy")
    renamed = second.rename(tmp_path / "best")
    tidy(tmp_path, JOB, 1)
    assert {path for path in tmp_path.iterdir() if path.is_dir()} == {copy, renamed, newest}
