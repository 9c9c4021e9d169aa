"""Which checkpoints of a job stay on disk, and removing the others."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ft.checkpoint import manifest as mf
from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.reader import read_manifest
from megatron_ft.core.errors import CheckpointDamagedError
from megatron_ft.core.identity import Ancestor, SnapshotId
from megatron_ft.core.lineage import on_lineage


@dataclass(frozen=True)
class Keep:
    """Which checkpoints of a job stay: the ``newest``, and the first one of every ``every``
    iterations (0: no others).  What is off ``lineage`` was given up by the job and does not
    count; () is an unknown lineage, off which nothing is.  What is of a later life stays.
    """

    newest: int
    every: int = 0
    lineage: tuple[Ancestor, ...] = ()


def superfluous(complete: Mapping[str, tuple[SnapshotId, int]], keep: Keep) -> list[str]:
    """Names of the checkpoints that go, oldest first.  Pure.

    ``complete`` maps names to snapshots and their iterations.
    """
    ordered = sorted(complete, key=lambda name: complete[name][0])
    ours = [n for n in ordered if not keep.lineage or on_lineage(complete[n][0], keep.lineage)]
    staying = set(ours[-keep.newest :])
    staying |= {name for name in ordered if _later(complete[name][0], keep.lineage)}
    periods: set[int] = set()
    for name in ours if keep.every else ():
        period = complete[name][1] // keep.every
        staying |= set() if period in periods else {name}
        periods.add(period)
    return [name for name in ordered if name not in staying]


def _later(snapshot: SnapshotId, lineage: Sequence[Ancestor]) -> bool:
    """Whether a snapshot is of a life after the one whose lineage this is.

    A drain may outlive its supervisor and finish when another life drains already: what it
    cannot know of is not its own to remove.
    """
    return bool(lineage) and snapshot.incarnation > lineage[-1].incarnation


def clean_up(directory: Path, job: uuid.UUID, keep: Keep, disk: Disk | None = None) -> list[Path]:
    """Remove the job's superfluous checkpoints; what was removed.

    Other jobs' folders, and whatever has no manifest that can be read, are left alone.  OSError
    if one cannot be removed, after the others were.
    """
    disk = disk or Disk()
    complete: dict[str, tuple[SnapshotId, int]] = {}
    for folder in _folders_of(directory, job):
        try:
            found = read_manifest(folder)
        except CheckpointDamagedError:
            continue
        if found.job == job:
            complete[folder.name] = (found.snapshot, found.iteration)
    removed = [directory / name for name in superfluous(complete, keep)]
    _each(removed, lambda folder: remove_checkpoint(folder, disk))
    return removed


def clear_unfinished(directory: Path, job: uuid.UUID, disk: Disk | None = None) -> list[Path]:
    """Remove the job's folders without a manifest; call it when no drain of the job writes.

    OSError if one cannot be removed, after the others were.
    """
    removed = [f for f in _folders_of(directory, job) if not mf.is_complete(f)]
    _each(removed, lambda folder: remove_checkpoint(folder, disk))
    return removed


def remove_checkpoint(folder: Path, disk: Disk | None = None) -> None:
    """Remove one, the manifest first: half a removal leaves no checkpoint that lacks bytes.

    OSError if something in it cannot be removed, after all that can was.
    """
    disk = disk or Disk()
    if mf.is_complete(folder):
        disk.remove(folder / mf.NAME)
        disk.sync_folder(folder)
    _each(sorted(folder.iterdir()), disk.remove)
    disk.remove_folder(folder)
    disk.sync_folder(folder.parent)


def _each(paths: Iterable[Path], remove: Callable[[Path], None]) -> None:
    """Remove them all, then raise what the first one met: one that stays must not keep the rest,
    whose space the next drain needs."""
    errors = []
    for path in paths:
        try:
            remove(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _folders_of(directory: Path, job: uuid.UUID) -> Iterable[Path]:
    return sorted(
        folder
        for folder in directory.iterdir()
        if mf.is_folder_of(folder.name, job) and not folder.is_symlink()
    )
