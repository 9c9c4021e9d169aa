"""Drains of the small jobs of disk_samples.py, on disks that fail or lose power."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from megatron_ft.checkpoint.disk_format import DiskCalls, folder_name
from megatron_ft.checkpoint.drain import publish, write_shards
from megatron_ft.checkpoint.drained import clean_up, clear_unfinished, open_checkpoint
from megatron_ft.checkpoint.live import open_live
from megatron_ft.checkpoint.source import OpenSnapshot, open_newest
from tests.support.disk_samples import JOB, Memory


def drain(
    memory: Memory, into: Path, iteration: int, disk: DiskCalls | None = None, keep: int = 2
) -> Path:
    """What a job does: write, publish, remove older ones."""
    with open_newest(open_live(memory.root, memory.job), iteration) as shards:
        folder = into / folder_name(JOB, iteration, shards.info.snapshot)
        write_shards(shards, folder, disk)
        publish(folder, shards.info, JOB, shards.lineage, len(shards), disk)
    clean_up(into, JOB, keep, disk=disk)
    clear_unfinished(into, JOB, disk)
    return folder


def same(one: OpenSnapshot, other: OpenSnapshot) -> bool:
    return (
        one.keys() == other.keys()
        and all(bytes(one[s].data) == bytes(other[s].data) for s in one)
        and all(one[s].record == other[s].record for s in one)
    )


class Recorder(DiskCalls):
    """Counts steps; what happens before step ``at`` is left to ``strike``."""

    def __init__(self, at: int = -1, strike: Callable[[], None] = lambda: None) -> None:
        self.at, self.strike, self.steps = at, strike, 0

    def _step(self) -> None:
        if self.steps == self.at:
            self.strike()
        self.steps += 1

    def open(self, path: Path) -> int:
        self._step()
        return super().open(path)

    def read(self, descriptor: int, buffer: memoryview, at: int) -> int:
        self._step()
        return super().read(descriptor, buffer[: max(1, len(buffer) // 2)], at)

    def create(self, path: Path) -> int:
        self._step()
        return super().create(path)

    def write(self, descriptor: int, data: memoryview) -> int:
        self._step()
        return super().write(descriptor, data[: max(1, len(data) // 2)])

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        self._step()
        super().sync_folder(folder)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)

    def remove_folder(self, folder: Path) -> None:
        self._step()
        super().remove_folder(folder)


def newest_of(memory: Memory, directory: Path) -> int:
    """Iteration of the newest checkpoint; every one with a manifest is what the arenas hold."""
    source, live = open_checkpoint(directory), open_live(memory.root, memory.job)
    infos = source.snapshots()
    assert infos, f"no checkpoint is left: {'; '.join(source.problems)}"
    for info in infos:
        with source.open(info) as stored, open_newest(live, info.iteration) as shards:
            assert same(shards, stored)
    return infos[0].iteration


def suicide() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> bool:
    """Run it in a forked child; whether that was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)
