"""A rank's share of a node's cores, as the kernel, the launcher and a quota say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ft.core.cores import own_cores, share_of, shared_cores


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cgroup of this process, on a machine of 128 cores."""
    folder = tmp_path / "cgroups" / "job" / "step"
    folder.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/elsewhere\n0::/job/step\n")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    return folder


def shared(cgroup: Path) -> int:
    return shared_cores(cgroup.parents[1], cgroup.parents[2] / "proc")


def test_the_innermost_cpuset_counts(cgroup: Path) -> None:
    assert shared(cgroup) == 128
    (cgroup.parents[1] / "cpuset.cpus.effective").write_text("0-127\n")
    (cgroup.parent / "cpuset.cpus.effective").write_text("0-7,16-23,40\n")
    assert shared(cgroup) == 17
    (cgroup / "cpuset.cpus.effective").write_text("\n")
    assert shared(cgroup) == 128, "an empty list says nothing"


def test_the_least_quota_of_all_counts(cgroup: Path) -> None:
    (cgroup / "cpu.max").write_text("max 100000\n")
    (cgroup.parent / "cpu.max").write_text("1250000 100000\n")
    assert shared(cgroup) == 12
    (cgroup.parents[1] / "cpu.max").write_text("50000 100000\n")
    assert shared(cgroup) == 1


def test_without_cgroups_it_is_the_machine(tmp_path: Path) -> None:
    assert shared_cores(tmp_path, tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ("may_run_on", "cores", "ranks", "threads"),
    [
        (2, 2, 1, 2),
        (128, 128, 8, 16),
        (16, 16, 8, 2),
        (2, 2, 8, 1),
        (12, 96, 8, 12),  # bound to cores of its own: not divided again
        (1, 96, 8, 1),
        (32, 32, 8, 4),  # a container's share of the node, for all its ranks
    ],
)
def test_a_rank_has_its_share(may_run_on: int, cores: int, ranks: int, threads: int) -> None:
    assert share_of(may_run_on, cores, ranks) == threads


def test_ranks_are_counted_as_torchrun_says(cgroup: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = cgroup.parents[1], cgroup.parents[2] / "proc"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(128)))
    for ranks, threads in (("8", 16), ("", 128), ("1", 128)):
        assert own_cores({"LOCAL_WORLD_SIZE": ranks}, *places) == threads
    assert own_cores({}, *places) == 128
