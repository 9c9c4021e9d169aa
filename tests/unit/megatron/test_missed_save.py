"""When a checkpoint of Megatron's that an incarnation did not finish is saved by the next one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_ft.checkpoint.native import TRACKER
from megatron_ft.megatron.own_checkpoints import SAVING_NOTE, is_missed


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def restored(folder: Path | str, iteration: int, interval: int | None = 10) -> SimpleNamespace:
    """Megatron's arguments of an incarnation that resumes from ``iteration`` of 40."""
    return SimpleNamespace(
        save=str(folder), save_interval=interval, iteration=iteration, train_iters=40
    )


def saved(folder: Path, iteration: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / TRACKER).write_text(str(iteration))
    return folder


@pytest.mark.parametrize(
    ("at", "newest", "missed"),
    [(20, 10, True), (20, 20, False), (20, 30, False), (25, 10, False), (40, 30, True)],
)
def test_one_that_was_due_and_is_not_there(
    tmp_path: Path, at: int, newest: int, missed: bool
) -> None:
    assert is_missed(restored(saved(tmp_path / "disk", newest), at)) is missed


def test_the_first_of_all(tmp_path: Path) -> None:
    assert is_missed(restored(tmp_path / "new" / "disk", 10))


def test_none_is_due_where_none_is_saved(tmp_path: Path) -> None:
    assert not is_missed(restored("", 20))
    assert not is_missed(restored(saved(tmp_path / "disk", 10), 20, interval=None))


def test_what_breaks_off_again_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each incarnation would end with it, and training stand still."""
    disk = saved(tmp_path / "disk", 10)
    assert [is_missed(restored(disk, 20)) for _ in range(3)] == [True, False, False]
    assert "the checkpoint of iteration 20 is left out" in caplog.text
    assert is_missed(restored(disk, 30)), "another one"


def test_the_last_is_tried_in_every_incarnation(tmp_path: Path) -> None:
    disk = saved(tmp_path / "disk", 30)
    assert [is_missed(restored(disk, 40)) for _ in range(3)] == [True, True, True]


def test_a_disk_that_takes_not_even_a_note_is_not_tried(tmp_path: Path) -> None:
    disk = saved(tmp_path / "disk", 10)
    (disk / SAVING_NOTE).mkdir()
    assert not is_missed(restored(disk, 20))
