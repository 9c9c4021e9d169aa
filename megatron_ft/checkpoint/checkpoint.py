"""Checkpoints that were drained, as a source to read from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from megatron_ft.arena.mapping import Mapping
from megatron_ft.checkpoint import manifest as mf
from megatron_ft.checkpoint.manifest import Manifest
from megatron_ft.checkpoint.reader import open_shard, read_manifest
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes, SnapshotInfo, take_apart
from megatron_ft.core.errors import CheckpointDamagedError, ConfigError, SnapshotUnavailableError

LEVEL = "durable"


def open_checkpoint(directory: Path) -> CheckpointSource:
    """One checkpoint, or all complete ones of a job in a drain folder.

    ConfigError if there is none, or they are of several jobs.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is no folder; give a checkpoint or a drain folder")
    if mf.is_complete(directory) or mf.looks_like_checkpoint(directory.name):
        return CheckpointSource(directory, [directory])
    folders = sorted(f for f in directory.iterdir() if mf.looks_like_checkpoint(f.name))
    if not folders:
        raise ConfigError(f"{directory} holds no checkpoint: no folder like iter_0000020-1.7-...")
    jobs = {folder.name.rpartition("-")[2]: folder for folder in folders}
    if len(jobs) > 1:
        examples = ", ".join(str(folder) for folder in jobs.values())
        raise ConfigError(
            f"{directory} holds checkpoints of {len(jobs)} jobs; give one: {examples}"
        )
    return CheckpointSource(directory, folders)


class CheckpointSource:
    """A SnapshotSource over checkpoints of one job on disk."""

    def __init__(self, directory: Path, folders: list[Path]) -> None:
        self._directory, self._folders = directory, folders
        self._problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def problems(self) -> tuple[str, ...]:
        """See SnapshotSource."""
        return self._problems

    def snapshots(self) -> list[SnapshotInfo]:
        """See SnapshotSource; only manifests are read."""
        infos, problems = [], []
        for folder in self._folders:
            try:
                manifest = read_manifest(folder)
                infos.append(SnapshotInfo(manifest.snapshot, manifest.iteration, LEVEL))
            except CheckpointDamagedError as error:
                problems.append(str(error))
        self._problems = tuple(problems)
        return sorted(infos, key=lambda info: info.snapshot, reverse=True)

    @contextmanager
    def open(self, info: SnapshotInfo) -> Iterator[OpenSnapshot]:
        """See SnapshotSource."""
        folder, manifest = self._find(info)
        shards = {shard_id: _open_shard(folder, shard_id, manifest) for shard_id in manifest.shards}
        yield OpenSnapshot(info, manifest.job, manifest.lineage, shards, lambda: None)

    def _find(self, info: SnapshotInfo) -> tuple[Path, Manifest]:
        for folder in self._folders:
            if f"-{info.snapshot}-" in folder.name or len(self._folders) == 1:
                manifest = read_manifest(folder)
                if manifest.snapshot == info.snapshot:
                    return folder, manifest
        raise SnapshotUnavailableError(f"{self} has no checkpoint of snapshot {info.snapshot}")


def _open_shard(folder: Path, shard_id: str, manifest: Manifest) -> ShardBytes:
    """Every byte is checked through read calls; what is mapped is in the page cache then."""
    with open_shard(folder, shard_id, manifest) as reader:
        reader.verify()
        mapping = Mapping(reader.descriptor, 0, reader.size, writable=False, name=str(reader.path))
        data = mapping.view(np.uint8, reader.start, reader.record.used_bytes)
        header, path = reader.header, str(reader.path)
    try:
        return take_apart(data, header.record, header.block_bytes, header.digest_algorithm, path)
    except SnapshotUnavailableError as error:
        raise CheckpointDamagedError(f"{error}; take another checkpoint") from error
