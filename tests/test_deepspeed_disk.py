"""Of which step the checkpoint is that DeepSpeed would load."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from deepspeed_ext.disk import disk_of  # noqa: E402
from deepspeed_ext.saving import NAME, Saved  # noqa: E402
from megatron_ft.recovery.start import Disk  # noqa: E402

ENGINE = SimpleNamespace(load_universal_checkpoint=lambda: False)
SAVED_BEFORE = {NAME: Saved("", "last", 12)._asdict()}
"""What a snapshot knows of a checkpoint with the tag that the files below have."""


def saved(folder: Path, files: dict[str, Any], latest_after: bool = True) -> str:
    """A checkpoint "last" of these files, of which ``latest`` was written after or before."""
    (folder / "last").mkdir()
    for name, content in files.items():
        torch.save(content, folder / "last" / name)
        os.utime(folder / "last" / name, ns=(10, 10))
    (folder / "latest").write_text("last")
    os.utime(folder / "latest", ns=(11, 11) if latest_after else (9, 9))
    return str(folder)


MODEL, OF_STAGE_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
EXPERT = "layer_0_expert_0_mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", [MODEL, OF_STAGE_3])
def test_a_free_tag_is_looked_into(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path, {name: {"global_steps": 20}, EXPERT: {"experts": 1}})
    assert disk_of(ENGINE, folder, None, {}) == Disk(20)
    assert disk_of(ENGINE, folder, "last", {}) == Disk(20, "the checkpoint 'last'")


def test_a_tag_that_was_saved_again_is_of_the_later_step(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {"global_steps": 20}})
    assert disk_of(ENGINE, folder, None, SAVED_BEFORE) == Disk(20)


def test_one_that_was_half_overwritten_is_of_the_earlier_step(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {"global_steps": 20}}, latest_after=False)
    assert disk_of(ENGINE, folder, None, SAVED_BEFORE) == Disk(12)


def test_one_that_cannot_be_read_is_left_to_deepspeed(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {}})
    (tmp_path / "last" / MODEL).write_bytes(b"cut off")
    assert disk_of(ENGINE, folder, None, {}) == Disk(0)
    os.utime(tmp_path / "last" / MODEL, ns=(10, 10))
    assert disk_of(ENGINE, folder, None, SAVED_BEFORE) == Disk(12)


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert disk_of(ENGINE, str(tmp_path), None, {}) == Disk(-1)
    assert disk_of(ENGINE, str(tmp_path), "last", SAVED_BEFORE) == Disk(-1)
