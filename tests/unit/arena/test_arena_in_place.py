"""Whether others who open an arena's path would find the same file, and all of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.captures import FakeSmp


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace(path: Path) -> None:
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


@pytest.mark.parametrize("change", [Path.unlink, cut, replace])
def test_an_arena_that_was_removed_cut_or_replaced_is_not_in_place(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    smp = FakeSmp(tmp_path)
    path = Path(smp.prepare(10_000, 1).arena)
    assert smp.arena is not None and smp.arena.in_place()
    change(path)
    assert not smp.arena.in_place()
    smp.arena.close()
