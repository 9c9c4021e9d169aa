"""Which exports of drained snapshots stay, and which are withdrawn."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.checkpoint.drain import DrainPlan
from megatron_ft.checkpoint.export import partial_of
from megatron_ft.checkpoint.export_drained import (
    LEDGER,
    Exported,
    given_up,
    is_ours,
    superfluous,
    tidy,
    withdraw,
)
from megatron_ft.checkpoint.native import (
    LATEST,
    TRACKER,
    checkpoint_folder,
    newest_checkpoint,
    point_tracker,
)
from megatron_ft.core.errors import ExportError
from megatron_ft.core.identity import Ancestor, SnapshotId


@settings(derandomize=True, deadline=None)
@given(st.lists(st.text(), unique=True), st.integers(1, 5))
def test_the_newest_stay(names: list[str], keep: int) -> None:
    removed = superfluous(names, keep)
    assert removed + names[-keep:] == names and len(names) - len(removed) <= keep


JOB = uuid.UUID(int=7)
ROLLED_BACK = (Ancestor(1, None), Ancestor(3, SnapshotId(1, 6)))
"""Incarnation 3 went back to the sixth snapshot of incarnation 1; all of incarnation 2 was given
up."""


def exported(iteration: int, snapshot: SnapshotId | None) -> Exported:
    return Exported(checkpoint_folder(Path(), iteration).name, snapshot)


@pytest.mark.parametrize(
    ("snapshot", "iteration", "gone"),
    [
        (SnapshotId(1, 6), 60, False),
        (SnapshotId(1, 7), 70, True),
        (SnapshotId(2, 1), 100, True),
        (SnapshotId(2, 1), 64, False),
        (SnapshotId(3, 1), 70, False),
        (SnapshotId(4, 1), 100, False),
        (None, 100, False),
    ],
)
def test_what_is_to_come_once_more_is_given_up(
    snapshot: SnapshotId | None, iteration: int, gone: bool
) -> None:
    one = exported(iteration, snapshot)
    assert given_up([one], 65, ROLLED_BACK) == [one] * gone
    assert given_up([one], 65, ()) == []


def plan_of(directory: Path, iteration: int) -> DrainPlan:
    snapshot = SnapshotId(3, 1)
    return DrainPlan(JOB, snapshot, iteration, "protected", ROLLED_BACK, directory, 1)


def have_exports(directory: Path, *known: Exported) -> None:
    """Each whole, the last one announced."""
    for one in known:
        (directory / one.name).mkdir()
        (directory / one.name / "data").touch()
        (directory / TRACKER).write_text(str(int(one.name.removeprefix("iter_"))))
    ledger = {JOB: [one if one.snapshot else one.name for one in known]}
    (directory / LEDGER).write_bytes(msgspec.json.encode(ledger))


WRITER: Any = SimpleNamespace(announce=point_tracker)


def test_an_export_of_what_was_rolled_back_is_not_loaded_again(tmp_path: Path) -> None:
    old, kept = exported(50, None), exported(60, SnapshotId(1, 6))
    have_exports(
        tmp_path, old, kept, exported(80, SnapshotId(2, 1)), exported(100, SnapshotId(2, 3))
    )
    withdraw(plan_of(tmp_path, 70), tmp_path, WRITER)
    assert {folder.name for folder in tmp_path.glob("iter_*")} == {old.name, kept.name}
    assert newest_checkpoint(tmp_path) == tmp_path / kept.name
    found = msgspec.json.decode((tmp_path / LEDGER).read_bytes(), type=dict[str, list[Exported]])
    assert found == {str(JOB): [old, kept]}


def test_nothing_is_announced_where_nothing_is_left(tmp_path: Path) -> None:
    have_exports(tmp_path, exported(100, SnapshotId(2, 3)))
    (tmp_path / LATEST).write_text("iter_0000100")
    withdraw(plan_of(tmp_path, 100), tmp_path, WRITER)
    assert [path.name for path in tmp_path.iterdir()] == [LEDGER]
    point_tracker(tmp_path, 70)
    assert (tmp_path / TRACKER).read_text() == "70"


def test_what_is_on_the_lineage_stays_as_it_is(tmp_path: Path) -> None:
    have_exports(tmp_path, exported(60, SnapshotId(1, 6)), exported(100, SnapshotId(3, 1)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    withdraw(plan_of(tmp_path, 70), tmp_path, WRITER)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_export_of_another_job_is_none_of_this_one(tmp_path: Path) -> None:
    one = exported(60, SnapshotId(1, 6))
    have_exports(tmp_path, one)
    assert is_ours(tmp_path / one.name, JOB)
    assert not is_ours(tmp_path / "iter_0000070", JOB), "the framework's own"
    with pytest.raises(ExportError, match=f"exported by another job .{JOB}.*--drain-export-dir"):
        is_ours(tmp_path / one.name, uuid.UUID(int=8))


@pytest.mark.parametrize("name", ["..", "", "../other", "/etc"])
def test_nothing_outside_of_its_folder_is_removed(tmp_path: Path, name: str) -> None:
    """Whoever may write to the folder may write the list of what is to be removed."""
    folder = tmp_path / "exports"
    for made in (folder, tmp_path / "other"):
        made.mkdir()
    (folder / LEDGER).write_bytes(
        msgspec.json.encode({JOB: [name, exported(100, SnapshotId(2, 3))]})
    )
    for remove in (
        lambda: withdraw(plan_of(folder, 70), folder, WRITER),
        lambda: tidy(folder, JOB, 1),
    ):
        with pytest.raises(ExportError, match="is no export in"):
            remove()
    assert {path.name for path in tmp_path.iterdir()} == {"exports", "other"}


def test_a_damaged_list_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_text("{")
    with pytest.raises(ExportError, match="is damaged .*remove it"):
        is_ours(tmp_path / "iter_0000070", JOB)


def test_what_a_killed_export_wrote_does_not_stay(tmp_path: Path) -> None:
    have_exports(tmp_path, *(exported(n, SnapshotId(1, n)) for n in (1, 2, 3)))
    killed, others = tmp_path / exported(2, None).name, uuid.UUID(int=1 << 120)
    killed.rename(partial_of(killed, JOB))
    partial_of(killed, others).mkdir()
    tidy(tmp_path, JOB, 1)
    left = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {exported(3, None).name, partial_of(killed, others).name}
    tidy(tmp_path, others, 1)
