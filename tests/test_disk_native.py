"""Which checkpoints of Megatron-LM count as complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.disk.native import TRACKER, newest_checkpoint


def checkpoint(directory: Path, name: str, tracker: str) -> Path:
    (directory / name).mkdir(parents=True)
    (directory / name / "metadata.json").write_text("{}")
    (directory / TRACKER).write_text(tracker)
    return directory / name


def test_the_checkpoint_that_the_tracker_names_is_found(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, "iter_0000120", "120\n")
    (tmp_path / "iter_0000200").mkdir()
    assert newest_checkpoint(tmp_path) == found


def test_a_release_is_found(tmp_path: Path) -> None:
    assert newest_checkpoint(checkpoint(tmp_path, "release", "release").parent) is not None


@pytest.mark.parametrize("tracker", ["", "none", "../iter_0000120", "-1", "121"])
def test_a_tracker_that_names_nothing_complete_finds_nothing(tmp_path: Path, tracker: str) -> None:
    checkpoint(tmp_path, "iter_0000120", tracker)
    (tmp_path / "iter_0000121").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_no_directory_and_no_tracker_find_nothing(tmp_path: Path) -> None:
    assert newest_checkpoint(None) is None
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
