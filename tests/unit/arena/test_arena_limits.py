"""Limits: the pure decision, made-up cgroup trees, the real machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.arena import limits
from megatron_ft.arena.format import Geometry
from megatron_ft.arena.limits import MemoryReading, memory_shortfall
from megatron_ft.core.errors import ArenaMemoryError
from tests.support.captures import FakeSmp

# Made-up limits are in MiB, so that the real file system below them always has room.
MIB, GIB = 1 << 20, 1 << 30
readings = st.lists(
    st.builds(MemoryReading, st.sampled_from("abc"), st.integers(-(1 << 50), 1 << 50))
)


@given(st.integers(0, 1 << 50), readings)
def test_the_tightest_limit_decides(need: int, given_readings: list[MemoryReading]) -> None:
    short = memory_shortfall(need, given_readings)
    enough = all(reading.available_bytes >= need for reading in given_readings)
    assert (short is None) == enough
    if short is not None:
        assert short in given_readings
        assert short.available_bytes == min(r.available_bytes for r in given_readings)


def test_the_arithmetic() -> None:
    words = limits.describe_requirement(Geometry(2, 3 * GIB, GIB, 1 << 20), 1, 3)
    assert "3.00 GiB of state per shard x 2 slots x (1 + 1/3) = 8.00 GiB" in words


def v2_tree(root: Path) -> Path:
    """job (8 MiB, of which 6 used, 1 of that page cache) / step (no limit) / ours (16 MiB)."""
    job = root / "cgroup" / "job"
    ours = job / "step" / "ours"
    ours.mkdir(parents=True)
    tree = {
        job: (str(8 * MIB), 6 * MIB, MIB),
        job / "step": ("max", 6 * MIB, 0),
        ours: (str(16 * MIB), MIB, 0),
    }
    for folder, (limit, used, cache) in tree.items():
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\nactive_file 0\n")
    process = root / "proc" / "self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text("0::/job/step/ours\n")
    (root / "proc" / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 1073741824 kB\n")
    return job


def check(root: Path, need: int) -> None:
    limits.check_memory(root, need, "sum", cgroup_root=root / "cgroup", proc=root / "proc")


def test_an_ancestor_limits_us_although_our_own_cgroup_does_not(tmp_path: Path) -> None:
    job = v2_tree(tmp_path)
    check(tmp_path, 3 * MIB)
    with pytest.raises(ArenaMemoryError) as caught:
        check(tmp_path, 3 * MIB + 1)
    message = str(caught.value)
    assert f"{job}/memory.max leaves 3.00 MiB" in message
    assert "sum" in message and str(3 * MIB + 1) in message


def test_throttling_counts_as_a_limit(tmp_path: Path) -> None:
    job = v2_tree(tmp_path)
    (job / "step" / "memory.high").write_text(str(7 * MIB))
    check(tmp_path, MIB)
    with pytest.raises(ArenaMemoryError, match="step/memory.high leaves 1.00 MiB"):
        check(tmp_path, 2 * MIB)


def test_version_1_limits(tmp_path: Path) -> None:
    v2_tree(tmp_path)
    folder = tmp_path / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    for where, limit in ((folder, 2 * MIB), (folder.parent, 0x7FFFFFFFFFFFF000)):
        (where / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (where / "memory.usage_in_bytes").write_text(f"{MIB}\n")
        (where / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 1024\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("9:cpu,cpuacct:/x\n4:memory:/job\n")
    check(tmp_path, MIB + 1024)
    with pytest.raises(ArenaMemoryError, match="memory.limit_in_bytes leaves 1.00 MiB"):
        check(tmp_path, MIB + 1025)


def test_in_a_container_the_mounts_root_is_our_cgroup(tmp_path: Path) -> None:
    v2_tree(tmp_path)
    root = tmp_path / "cgroup"
    for folder, limit in ((root, 2 * MIB), (tmp_path, MIB)):
        # The second is outside: nothing that ".." leads to is a cgroup of ours.
        (folder / "memory.max").write_text(str(limit))
        (folder / "memory.current").write_text(str(MIB))
    for path in ("/host/only/path", "/../..", "/..", "/"):
        (tmp_path / "proc" / "self" / "cgroup").write_text(f"0::{path}\n")
        check(tmp_path, MIB)
        with pytest.raises(ArenaMemoryError, match="cgroup/memory.max leaves 1.00 MiB"):
            check(tmp_path, MIB + 1)


def test_the_machines_memory_is_a_limit(tmp_path: Path) -> None:
    v2_tree(tmp_path)
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 1024 kB\n")
    check(tmp_path, MIB)
    with pytest.raises(ArenaMemoryError, match="available memory of the machine leaves 1.00 MiB"):
        check(tmp_path, MIB + 1)


def test_free_space_of_the_file_system_is_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ArenaMemoryError, match="leaves"):
        limits.check_memory(tmp_path, 1 << 60, "far too much")


def test_unreadable_files_are_no_limits(tmp_path: Path) -> None:
    job = v2_tree(tmp_path)
    (job / "memory.max").write_text("nonsense\n")
    (job / "step" / "memory.current").unlink()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable\nhuh: \n")
    check(tmp_path, 15 * MIB)


def test_the_real_machine_has_room_for_a_page(tmp_path: Path) -> None:
    found = limits.memory_readings(tmp_path)
    assert len(found) >= 2, "neither /proc/meminfo nor a cgroup was read"
    assert all(reading.available_bytes < 1 << 60 for reading in found)
    limits.check_memory(tmp_path, 4096, "a page")


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
