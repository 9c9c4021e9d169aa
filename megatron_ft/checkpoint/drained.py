"""Drained checkpoints: what there is, which one a job starts from, and which ones stay on disk.

A job starts from one when its memory cannot serve.  Only manifests and the lengths of files are
read here; bytes are checked as they are loaded (load.py), and a checkpoint that turns out damaged
is given as ``refused`` next time.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.checkpoint.disk_format import (
    MANIFEST,
    DiskCalls,
    Manifest,
    is_checkpoint_name,
    is_complete,
)
from megatron_ft.checkpoint.load import LEVEL, open_bytes, open_shard, read_manifest
from megatron_ft.checkpoint.source import OpenSnapshot, ShardParts, SnapshotInfo
from megatron_ft.core.errors import CheckpointDamagedError, ConfigError
from megatron_ft.core.identity import Ancestor, ShardPlacement, SnapshotId, on_lineage

Objection = Callable[[SnapshotId, int], str]


@dataclass(frozen=True)
class Drained:
    """One checkpoint that is complete as far as its manifest says."""

    folder: Path
    manifest: Manifest

    @property
    def seats(self) -> dict[str, ShardPlacement]:
        """ShardPlacement of each shard; without those that nobody knew."""
        return {s: line.seat for s, line in self.manifest.shards.items() if line.seat is not None}

    @property
    def slot_bytes(self) -> dict[str, int]:
        """Bytes of a slot that each shard needs: as its trainer asked for, and as are stored."""
        lines = self.manifest.shards
        return {s: max(seat.required_bytes, lines[s].bytes) for s, seat in self.seats.items()}


@dataclass(frozen=True)
class DiskCriteria:
    """Conditions that a checkpoint must meet to be taken.

    ``lineage`` is that of the job's last incarnation, () if it is not known.  ``newer_than`` is
    what memory can serve; ``own_iteration`` the newest checkpoint of the training framework's own,
    -1 if there is none.  ``refused`` are folders that were tried and are damaged;
    ``reason_against`` says of a snapshot and its iteration why it must not be used, or nothing.
    """

    shard_count: int
    lineage: tuple[Ancestor, ...] = ()
    newer_than: SnapshotId | None = None
    own_iteration: int = -1
    refused: Collection[Path] = ()
    reason_against: Objection = lambda snapshot, iteration: ""


@dataclass(frozen=True)
class Choice:
    """The checkpoint to take, or None; ``reasons`` say why newer ones were not taken.

    ``kept`` is the one that would be taken if memory served nothing.
    """

    taken: Drained | None
    reasons: tuple[str, ...] = field(default=())
    kept: Drained | None = None


def find(directory: Path, job: uuid.UUID | None = None) -> tuple[list[Drained], list[str]]:
    """Complete checkpoints of a job (None: of any) in a drain folder, and what is in the way.

    A disk that cannot be read is one of the latter, never an exception.
    """
    try:
        names = [f for f in sorted(directory.iterdir()) if is_checkpoint_name(f.name, job)]
    except OSError as error:
        return [], [f"{directory} cannot be read: {error.strerror}"]
    found, problems = _inspected(names)
    return [one for one in found if job in (None, one.manifest.job)], problems


def _inspected(folders: Iterable[Path]) -> tuple[list[Drained], list[str]]:
    found, problems = [], []
    for folder in folders:
        try:
            found.append(inspect(folder))
        except CheckpointDamagedError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{error.filename or folder} cannot be read: {error.strerror}")
    return found, problems


def inspect(folder: Path) -> Drained:
    """One checkpoint; CheckpointDamagedError or OSError if it is not complete."""
    manifest = read_manifest(folder)
    for line in manifest.shards.values():
        size = (folder / line.file).stat().st_size
        if size != line.bytes:
            raise CheckpointDamagedError(
                f"{folder / line.file} has {size} bytes, the manifest says {line.bytes}"
            )
    return Drained(folder, manifest)


def of_one_job(directory: Path, asking: uuid.UUID | None = None) -> list[Drained]:
    """The checkpoints that a user names: one, or a drain folder of one job; ConfigError.

    What the job ``asking`` has drained to the same folder since is left out.
    """
    found, problems = _named(directory, asking)
    if not found:
        raise ConfigError(f"{directory} holds no whole checkpoint: {'; '.join(problems)}")
    return found


def _named(directory: Path, asking: uuid.UUID | None = None) -> tuple[list[Drained], list[str]]:
    """As of_one_job, with what is in the way of others."""
    if is_complete(directory) or is_checkpoint_name(directory.name):
        return _inspected([directory])
    found, problems = find(directory)
    found = [one for one in found if one.manifest.job != asking] or found
    jobs = {one.manifest.job: str(one.folder) for one in found}
    if len(jobs) > 1:
        raise ConfigError(
            f"{directory} holds checkpoints of {len(jobs)} jobs; give one: "
            f"{', '.join(jobs.values())}"
        )
    if not found and not problems:
        raise ConfigError(
            f"{directory} holds no whole checkpoint: give a folder like iter_0000020-1.7, or the "
            "folder that it is in"
        )
    return found, problems


def open_checkpoint(directory: Path) -> CheckpointSource:
    """One checkpoint, or all complete ones of a job in a drain folder.

    ConfigError if there is none, or they are of several jobs.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a folder; give a checkpoint or a drain folder")
    return CheckpointSource(directory, *_named(directory))


class CheckpointSource:
    """A SnapshotSource over checkpoints of one job on disk."""

    def __init__(self, directory: Path, found: Sequence[Drained], problems: Sequence[str]) -> None:
        self._directory, self.problems = directory, tuple(problems)
        self._found = {one.manifest.snapshot: one for one in found}

    def __str__(self) -> str:
        return str(self._directory)

    def snapshots(self) -> list[SnapshotInfo]:
        newest = sorted(self._found.items(), reverse=True, key=lambda item: item[0])
        return [SnapshotInfo(one, held.manifest.iteration, LEVEL) for one, held in newest]

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        one = self._found[info.snapshot]
        manifest = one.manifest
        shards = {shard: open_bytes(one.folder, shard, manifest) for shard in manifest.shards}
        yield OpenSnapshot(info, manifest.job, manifest.lineage, shards, lambda: None)

    @contextmanager
    def open_parts(self, info: SnapshotInfo) -> Iterator[dict[str, ShardParts]]:
        one = self._found[info.snapshot]
        with ExitStack() as opened:
            shards = {}
            for shard_id in one.manifest.shards:
                reader = opened.enter_context(open_shard(one.folder, shard_id, one.manifest))
                shards[shard_id] = ShardParts.of(reader.record, reader.read_range, str(reader.path))
            yield shards


def choose(found: Sequence[Drained], wanted: DiskCriteria) -> Choice:
    """The newest checkpoint that may be taken.  Pure."""
    known = [one.manifest.lineage for one in found if one.manifest.lineage]
    newest = max(known, key=lambda lineage: lineage[-1].incarnation, default=())
    lineage = wanted.lineage or newest
    reasons: list[str] = []
    for one in sorted(found, key=lambda one: one.manifest.snapshot, reverse=True):
        snapshot = one.manifest.snapshot
        if wanted.newer_than is not None and snapshot <= wanted.newer_than:
            break
        reason = _reason_against(one, wanted, lineage)
        if not reason:
            return Choice(one, tuple(reasons))
        reasons.append(f"{one.folder.name} {reason}")
    return Choice(None, tuple(reasons))


def _reason_against(one: Drained, wanted: DiskCriteria, lineage: Sequence[Ancestor]) -> str:
    manifest = one.manifest
    if not on_lineage(manifest.snapshot, lineage):
        return "is off the job's lineage: the job was rolled back to before it"
    if one.folder in wanted.refused:
        return "is damaged"
    if len(one.seats) != len(manifest.shards):
        return "does not say where its shards belong; it can only be exported"
    if sorted(seat.rank for seat in one.seats.values()) != list(range(len(one.seats))):
        return "has no shard of some rank; it can only be exported"
    if wanted.newer_than is not None and len(one.seats) != wanted.shard_count:
        # Of another layout, it would be reshaped, which takes the place of all that is in memory.
        return f"has {len(manifest.shards)} shards, the job {wanted.shard_count}"
    if manifest.iteration < wanted.own_iteration:
        return f"is older than the framework's own checkpoint of {wanted.own_iteration}"
    objection = wanted.reason_against(manifest.snapshot, manifest.iteration)
    return f"is not used: {objection}" if objection else ""


def superfluous(
    complete: Mapping[str, SnapshotId], keep: int, lineage: tuple[Ancestor, ...] = ()
) -> list[str]:
    """Names of the checkpoints beyond the newest ``keep``, oldest first.  Pure.

    What is off ``lineage`` was given up by the job and does not count; () is an unknown
    lineage, off which nothing is.  What is of a later incarnation stays.
    """
    ordered = sorted(complete, key=lambda name: complete[name])
    ours = [n for n in ordered if not lineage or on_lineage(complete[n], lineage)]
    staying = {*ours[-keep:], *(n for n in ordered if _later(complete[n], lineage))}
    return [name for name in ordered if name not in staying]


def _later(snapshot: SnapshotId, lineage: Sequence[Ancestor]) -> bool:
    """True if a snapshot is of an incarnation after the one whose lineage this is.

    A drain may outlive its supervisor and finish when another incarnation drains already: it
    must not remove what it cannot know of.
    """
    return bool(lineage) and snapshot.incarnation > lineage[-1].incarnation


def clean_up(
    directory: Path,
    job: uuid.UUID,
    keep: int,
    lineage: tuple[Ancestor, ...] = (),
    disk: DiskCalls | None = None,
) -> list[Path]:
    """Remove the job's superfluous checkpoints; what was removed.

    Other jobs' folders, and whatever has no manifest that can be read, are left alone.  OSError
    if one cannot be removed, after the others were.
    """
    disk = disk or DiskCalls()
    complete: dict[str, SnapshotId] = {}
    for folder in _folders_of(directory, job):
        try:
            found = read_manifest(folder)
        except CheckpointDamagedError:
            continue
        if found.job == job:
            complete[folder.name] = found.snapshot
    removed = [directory / name for name in superfluous(complete, keep, lineage)]
    _each(removed, lambda folder: remove_checkpoint(folder, disk))
    return removed


def clear_unfinished(directory: Path, job: uuid.UUID, disk: DiskCalls | None = None) -> list[Path]:
    """Remove the job's folders without a manifest; call it when no drain of the job writes.

    OSError if one cannot be removed, after the others were.
    """
    removed = [f for f in _folders_of(directory, job) if not is_complete(f)]
    _each(removed, lambda folder: remove_checkpoint(folder, disk))
    return removed


def remove_checkpoint(folder: Path, disk: DiskCalls | None = None) -> None:
    """Remove one, the manifest first: half a removal leaves no checkpoint that lacks bytes.

    OSError if something in it cannot be removed, after all that can was.
    """
    disk = disk or DiskCalls()
    if is_complete(folder):
        disk.remove(folder / MANIFEST)
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
        if is_checkpoint_name(folder.name, job) and not folder.is_symlink()
    )
