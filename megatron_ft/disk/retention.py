"""Which checkpoints of a job stay on disk, and removing the others."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron_ft.disk import manifest as mf
from megatron_ft.disk.durable import Disk
from megatron_ft.disk.manifest import Manifest
from megatron_ft.errors import CheckpointDamagedError
from megatron_ft.identity import SnapshotId


def superfluous(complete: Mapping[str, SnapshotId], keep: int) -> list[str]:
    """Names of checkpoints beyond the newest ``keep``, oldest first.  Pure."""
    ordered = sorted(complete, key=lambda name: complete[name])
    return ordered[: max(0, len(ordered) - keep)]


def clean_up(directory: Path, job: uuid.UUID, keep: int, disk: Disk | None = None) -> list[Path]:
    """Remove the job's older checkpoints; what was removed.

    Other jobs' folders, and whatever has no manifest that can be read, are left alone.
    """
    disk = disk or Disk()
    complete: dict[str, SnapshotId] = {}
    for folder in _folders_of(directory, job):
        try:
            found = Manifest.read(folder)
        except CheckpointDamagedError:
            continue
        if found.job == job:
            complete[folder.name] = found.snapshot
    removed = [directory / name for name in superfluous(complete, keep)]
    for folder in removed:
        remove_checkpoint(folder, disk)
    return removed


def clear_unfinished(directory: Path, job: uuid.UUID, disk: Disk | None = None) -> list[Path]:
    """Remove the job's folders without a manifest; call it when no drain of the job writes."""
    removed = [f for f in _folders_of(directory, job) if not mf.is_complete(f)]
    for folder in removed:
        remove_checkpoint(folder, disk)
    return removed


def remove_checkpoint(folder: Path, disk: Disk | None = None) -> None:
    """Remove one, the manifest first: half a removal leaves no checkpoint that lacks bytes."""
    disk = disk or Disk()
    if mf.is_complete(folder):
        disk.remove(folder / mf.NAME)
        disk.sync_folder(folder)
    for path in sorted(folder.iterdir()):
        disk.remove(path)
    disk.remove_folder(folder)
    disk.sync_folder(folder.parent)


def _folders_of(directory: Path, job: uuid.UUID) -> Iterable[Path]:
    return sorted(
        folder
        for folder in directory.iterdir()
        if mf.is_folder_of(folder.name, job) and not folder.is_symlink()
    )
