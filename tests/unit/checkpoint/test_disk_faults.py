"""Disks that fail, stop or lose their process at any step, and what a drain costs in memory."""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path

import pytest

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import verify_shard
from megatron_ft.arena.format import SlotState
from megatron_ft.checkpoint import drain as write
from megatron_ft.checkpoint.disk_format import DiskCalls
from megatron_ft.checkpoint.load import fill, read_manifest
from tests.support.disk_drains import Recorder, drain, killed, newest_of, suicide
from tests.support.disk_samples import BLOCK, Memory, waiting

ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE, errno.EDQUOT)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path / "shm")
    memory.commit(1, 10)
    memory.commit(2, 20)
    return memory


def fail(number: int) -> None:
    raise OSError(number, "from the disk")


def test_an_error_at_any_step_spares_the_last_checkpoint_and_the_next_drain_recovers(
    memory: Memory, tmp_path: Path
) -> None:
    """The drain of 20 meets one at each of its steps in turn, tidying up included."""
    before = tmp_path / "before"
    drain(memory, before, 10)
    disk, at, seen = tmp_path / "disk", 0, []
    while True:
        shutil.copytree(before, disk)
        number = ERRORS[at % len(ERRORS)]
        try:
            drain(memory, disk, 20, Recorder(at, partial(fail, number)), keep=1)
        except OSError as error:
            assert error.errno == number
        else:
            break
        seen.append(newest_of(memory, disk))
        if at % 3 == 0:
            drain(memory, disk, 20, keep=1)
            assert newest_of(memory, disk) == 20 and len(list(disk.iterdir())) == 1, at
        shutil.rmtree(disk)
        at += 1
    assert at > 20 and seen == sorted(seen) and set(seen) == {10, 20}


def test_a_load_that_is_killed_at_any_step_can_be_done_again(
    memory: Memory, tmp_path: Path
) -> None:
    folder = drain(memory, tmp_path / "disk", 20)
    manifest = read_manifest(folder)
    new = waiting(tmp_path / "new", sequence=2)
    path, counted = new.path("dp0"), Recorder()
    fill(path, folder, "dp0", manifest, counted)
    assert counted.steps > 5
    for at in range(counted.steps):
        disk = Recorder(at, suicide)
        with Arena.open(path) as arena:
            arena.data(1, writable=True)[:] = 0xFF
        assert killed(partial(fill, path, folder, "dp0", manifest, disk))
        with Arena.open(path) as arena:
            assert arena.slot(1).state == SlotState.REBUILDING, "it counts as lost"
        record = fill(path, folder, "dp0", manifest)
        with Arena.open(path) as arena:
            assert verify_shard(arena.data(1), record, BLOCK) == []


class Scale(DiskCalls):
    """Notes the most anonymous memory that the process had at any write or read."""

    def __init__(self) -> None:
        self.start = self.most = _anonymous_bytes()

    def write(self, descriptor: int, data: memoryview) -> int:
        self.most = max(self.most, _anonymous_bytes())
        return super().write(descriptor, data)

    def read(self, descriptor: int, buffer: memoryview, at: int) -> int:
        self.most = max(self.most, _anonymous_bytes())
        return super().read(descriptor, buffer, at)


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def test_memory_of_a_drain_and_of_a_load_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    shard_bytes = 48 << 20
    memory = Memory(tmp_path / "shm", width=shard_bytes // 12)
    memory.commit(1, 10)
    scale = Scale()
    folder = drain(memory, tmp_path / "disk", 10, scale)
    assert scale.most - scale.start < 3 * write.PIECE_BYTES < shard_bytes // 3
    new = waiting(tmp_path / "new", width=shard_bytes // 12)
    scale = Scale()
    fill(new.path("dp0"), folder, "dp0", read_manifest(folder), scale)
    assert scale.most - scale.start < write.PIECE_BYTES
