"""Which checkpoints of Megatron-LM count as complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ft.checkpoint.native import (
    LATEST,
    TRACKER,
    latest_tag,
    newest_checkpoint,
    point_tracker,
    step_of_tag,
)


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


@pytest.mark.parametrize("tracker", ["", "none", "../iter_0000120", "-1", "121", "122", "123"])
def test_a_tracker_that_names_nothing_complete_finds_nothing(tmp_path: Path, tracker: str) -> None:
    checkpoint(tmp_path, "iter_0000120", tracker)
    (tmp_path / "iter_0000121").mkdir()
    (tmp_path / "iter_0000122").touch()
    assert newest_checkpoint(tmp_path) is None


TORN = [b"\xff\xfe120", b"\0" * 4, "\u00b2".encode()]


@pytest.mark.parametrize("name", [TRACKER, LATEST])
@pytest.mark.parametrize("torn", TORN)
def test_what_a_power_loss_made_of_a_name_finds_nothing(
    tmp_path: Path, name: str, torn: bytes
) -> None:
    (tmp_path / name).write_bytes(torn)
    assert newest_checkpoint(tmp_path) is None
    point_tracker(tmp_path, 120)
    assert (tmp_path / TRACKER).read_text() == "120"


def test_no_directory_and_no_tracker_find_nothing(tmp_path: Path) -> None:
    assert newest_checkpoint(None) is None
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None


def deepspeeds(directory: Path, tag: str, latest: str) -> Path:
    (directory / tag).mkdir(parents=True)
    (directory / tag / "mp_rank_00_model_states.pt").write_text("")
    (directory / LATEST).write_text(latest)
    return directory / tag


@pytest.mark.parametrize("tag", ["global_step40", "best", "run 1/epoch3"])
def test_the_checkpoint_that_latest_names_is_found(tmp_path: Path, tag: str) -> None:
    found = deepspeeds(tmp_path, tag, f"{tag}\n")
    (tmp_path / "global_step50").mkdir()
    assert newest_checkpoint(tmp_path) == found and latest_tag(tmp_path) == tag


@pytest.mark.parametrize(
    "latest", ["", "\n", ".", "..", "../other", "/etc", "global_step50", "absent"]
)
def test_a_latest_that_names_nothing_complete_finds_nothing(tmp_path: Path, latest: str) -> None:
    deepspeeds(tmp_path, "global_step40", latest)
    (tmp_path / "global_step50").mkdir()
    assert newest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("tag", "step"),
    [("global_step40", 40), ("best", None), ("global_step4b", None), ("my_global_step4", None)],
)
def test_only_a_tag_of_deepspeeds_own_tells_its_step(tag: str, step: int | None) -> None:
    assert step_of_tag(tag) == step


@pytest.mark.parametrize(
    ("before", "after"), [(None, "120"), ("40", "120"), ("200", "200"), ("release", "120")]
)
def test_the_tracker_is_never_turned_back(tmp_path: Path, before: str | None, after: str) -> None:
    if before is not None:
        (tmp_path / TRACKER).write_text(before)
    point_tracker(tmp_path, 120)
    assert (tmp_path / TRACKER).read_text() == after
