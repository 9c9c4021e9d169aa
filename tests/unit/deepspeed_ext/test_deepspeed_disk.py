"""Of which step the checkpoint is that DeepSpeed would load."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext import saving
from deepspeed_ext.saving import Checkpoints, Named, disk_of
from megatron_ft.trainer.start_choice import WISH, DiskStart

ENGINE = SimpleNamespace(load_universal_checkpoint=lambda: False)


def saved_before(folder: Path) -> Named:
    """What a snapshot knows of a checkpoint with the tag that the files below have."""
    return Named(os.path.realpath(folder), "last", 12)


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
    assert disk_of(ENGINE, folder, None, None) == DiskStart(20)
    assert disk_of(ENGINE, folder, "last", None) == DiskStart(20, "the checkpoint 'last'")


def test_a_tag_that_was_saved_again_is_of_the_later_step(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {"global_steps": 20}})
    assert disk_of(ENGINE, folder, None, saved_before(tmp_path)) == DiskStart(20)


def test_one_that_was_half_overwritten_is_of_the_earlier_step(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {"global_steps": 20}}, latest_after=False)
    assert disk_of(ENGINE, folder, None, saved_before(tmp_path)) == DiskStart(12)


def test_one_that_cannot_be_read_is_left_to_deepspeed(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {}})
    (tmp_path / "last" / MODEL).write_bytes(b"cut off")
    assert disk_of(ENGINE, folder, None, None) == DiskStart(0)
    os.utime(tmp_path / "last" / MODEL, ns=(10, 10))
    assert disk_of(ENGINE, folder, None, saved_before(tmp_path)) == DiskStart(12)


def test_without_a_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    assert disk_of(ENGINE, str(tmp_path), None, None) == DiskStart(-1)
    assert disk_of(ENGINE, str(tmp_path), "last", saved_before(tmp_path)) == DiskStart(-1)


def test_a_tag_of_another_folder_is_another_checkpoint(tmp_path: Path) -> None:
    folder = saved(tmp_path, {MODEL: {"global_steps": 20}}, latest_after=False)
    assert disk_of(ENGINE, folder, "last", saved_before(tmp_path / "elsewhere")).iteration == 20
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    assert disk_of(ENGINE, str(link), "last", saved_before(tmp_path)).iteration == 12


folders, tags, steps = (st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"]), st.integers(0, 3))


@given(folders, st.none() | tags, steps, folders, st.none() | tags, tags, steps, st.integers(0, 3))
def test_a_checkpoint_that_the_lineage_did_not_have_is_new(
    before: str,
    tag_before: str | None,
    step_before: int,
    now: str,
    tag_now: str | None,
    found: str,
    step: int,
    offered: int,
) -> None:
    """Only what was named before, at the same step, or what it has saved itself, is not."""
    found = tag_now or found
    first, second = Checkpoints(ENGINE), Checkpoints(ENGINE)

    def is_new(part: Checkpoints, folder: str, tag: str | None, at: int, objects: Any) -> Any:
        with patch.multiple(
            saving,
            disk_of=lambda *_: DiskStart(at, tag or ""),
            _tag_on_disk=lambda *_: (tag or found) if at >= 0 else "",
        ):
            return part.find(folder, tag, offered, objects)[1]

    is_new(first, before, tag_before, step_before, {})
    objects = {WISH: first.state_dict()}
    same = before == now and tag_before == tag_now
    unchanged = same and (tag_now is None or step == step_before)
    assert is_new(second, now, tag_now, step, objects) == (not unchanged)
    assert not is_new(second, now, tag_now, -1, objects)
    first.saved = Named(os.path.realpath(now), found, step)
    follows = unchanged or (step <= offered and (same or tag_now is None))
    assert is_new(second, now, tag_now, step, {WISH: first.state_dict()}) == (not follows)
