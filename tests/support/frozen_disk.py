"""A small file system of its own that can be frozen: its writers wait in the kernel.

Not even SIGKILL ends a process that waits so, as behind a file server that does not answer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ft.core import procfs
from megatron_ft.core.environment import JOB

TOOLS = ("mkfs.ext4", "fsfreeze", "mount", "umount")


@dataclass
class FrozenDisk:
    """The folder of the file system; it is writable until ``freeze``."""

    folder: Path
    frozen: bool = False

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "-f", str(self.folder)], check=True)
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            subprocess.run(["fsfreeze", "-u", str(self.folder)], check=True)
            self.frozen = False


def can_freeze() -> bool:
    """True if this user may mount, and has the tools."""
    return os.geteuid() == 0 and all(shutil.which(tool) is not None for tool in TOOLS)


def stuck(job: str) -> list[int]:
    """Processes of a job that wait for a disk (state D in proc(5))."""
    return [
        pid
        for pid in procfs.own_processes()
        if procfs.read_environment(pid).get(JOB) == job
        and procfs.read_status(pid).get("State", "").startswith("D")
    ]


@contextmanager
def freezable(folder: Path, mebibytes: int = 16, name: str = "mounted") -> Iterator[FrozenDisk]:
    """Mount one in ``folder``; the test is skipped where that cannot be."""
    if not can_freeze():
        pytest.skip("cannot freeze a file system: needs root, fsfreeze and mkfs.ext4")
    image, place = folder / "disk.img", folder / name
    with open(image, "wb") as file:
        file.truncate(mebibytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True)
    place.mkdir()
    if subprocess.call(["mount", "-o", "loop", str(image), str(place)]) != 0:
        pytest.skip("cannot freeze a file system: no loop device")
    disk = FrozenDisk(place)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "-l", str(place)], check=True)
