"""Kills for want of memory are told from other deaths by signal 9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from megatron_ft.supervisor.events import JobEvent, Observers
from megatron_ft.supervisor.failures import OomKills
from tests.support.slurm_cluster import missing_cgroups

MISSING = missing_cgroups() if os.geteuid() == 0 else "needs root"


def watch(folder: Path, membership: str) -> OomKills:
    """A watch of the group that ``membership``, as of /proc/self/cgroup, names."""
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self" / "cgroup").write_text(membership)
    return OomKills(folder / "groups", folder)


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/job/step\n", "job/memory.events", "low 0\nmax 3\noom 2\noom_kill {}\n"),
        ("4:memory:/job\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    ],
    ids=["version 2", "version 1"],
)
def test_a_count_that_has_risen_is_told_once(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    counter = tmp_path / "groups" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text.format(4))
    kills = watch(tmp_path, membership)
    assert kills.poll() == "", "those before the job are not its own"
    counter.write_text(text.format(6))
    assert f"killed 2 processes of memory cgroup {counter.parent}" in kills.poll()
    assert kills.poll() == ""
    counter.unlink()
    assert kills.poll() == "", "the group is gone"


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_process_that_the_kernel_kills_for_want_of_memory(tmp_path: Path) -> None:
    name = f"megatron-ft-{uuid.uuid4().hex[:8]}"
    group = Path("/sys/fs/cgroup/memory") / name
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(32 << 20))
        (tmp_path / "groups").symlink_to("/sys/fs/cgroup")
        kills = watch(tmp_path, f"4:memory:/{name}\n")
        join = f"open('{group}/cgroup.procs', 'w').write('0')"
        program = [sys.executable, "-c", f"{join}; b'x' * (256 << 20)"]
        ended = subprocess.run(program, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert name in kills.poll()
    finally:
        group.rmdir()


@pytest.mark.parametrize("kind", ["smp_restarted", "world_ended"])
def test_the_console_names_it_where_a_daemon_or_an_encoder_died(tmp_path: Path, kind: str) -> None:
    counter = tmp_path / "groups" / "job" / "memory.events"
    counter.parent.mkdir(parents=True)
    counter.write_text("oom_kill 0\n")
    observers, told = Observers(), list[JobEvent]()
    watch(tmp_path, "0::/job\n").report_to(observers)
    observers.add(told.append)
    observers.emit(kind, "it died")
    counter.write_text("oom_kill 1\n")
    observers.emit("training", "training")
    observers.emit(kind, "it died")
    assert [e.kind for e in told] == [kind, "training", "oom", kind]
    assert "killed 1 processes of memory cgroup" in told[2].text
