"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.source import OpenSnapshot
from megatron_ft.core.fault_points import reach


@contextmanager
def whole_folder(folder: Path, shards: OpenSnapshot, disk: Disk | None = None) -> Iterator[Path]:
    """A folder to write to, which gets the name ``folder`` when the block has ended well.

    Before that ``shards`` are checked, which may still refuse, and what was written is made
    durable.  After an error nothing is left of it.
    """
    disk, partial = disk or Disk(), partial_of(folder, shards.job)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        reach("export.written")
        shards.check()
        _sync(partial, disk)
        disk.rename(partial, folder)
        disk.sync_folder(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def partial_of(folder: Path, job: uuid.UUID) -> Path:
    """Where a job writes what will be ``folder``; another job may write one of that name, too."""
    return folder.with_name(f".{folder.name}.{job.hex[:8]}.partial")


def _sync(folder: Path, disk: Disk) -> None:
    """Frameworks sync some of the files that they write, and not others."""
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            descriptor = disk.open(Path(base, name))
            try:
                disk.sync(descriptor)
            finally:
                os.close(descriptor)
        disk.sync_folder(Path(base))
