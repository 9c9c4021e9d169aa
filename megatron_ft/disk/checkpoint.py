"""Checkpoints that were drained, as a source to read from."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena.mapping import Mapping
from megatron_ft.disk import manifest as mf
from megatron_ft.disk import safetensors as st
from megatron_ft.disk.manifest import Manifest, ShardFile
from megatron_ft.disk.source import OpenSnapshot, ShardBytes, SnapshotInfo, verified_shard
from megatron_ft.errors import CheckpointDamagedError, ConfigError, SnapshotUnavailableError

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
        shards = {
            shard_id: _open_shard(folder, shard_id, line, manifest)
            for shard_id, line in manifest.shards.items()
        }
        yield OpenSnapshot(info, manifest.job, manifest.lineage, shards, lambda: None)

    def _find(self, info: SnapshotInfo) -> tuple[Path, Manifest]:
        for folder in self._folders:
            if f"-{info.snapshot}-" in folder.name or len(self._folders) == 1:
                manifest = read_manifest(folder)
                if manifest.snapshot == info.snapshot:
                    return folder, manifest
        raise SnapshotUnavailableError(f"{self} has no checkpoint of snapshot {info.snapshot}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that only we can have written; CheckpointDamagedError."""
    _check_owner(folder)
    return Manifest.read(folder)


def _check_owner(path: Path) -> None:
    """What is opened here may be unpickled later: it must be ours, as arenas must."""
    info = path.stat()
    if info.st_uid != os.geteuid() or info.st_mode & stat.S_IWOTH:
        raise CheckpointDamagedError(
            f"{path} belongs to user {info.st_uid} or may be written by all: it is not trusted; "
            "copy it and give the copy"
        )


def _open_shard(folder: Path, shard_id: str, line: ShardFile, manifest: Manifest) -> ShardBytes:
    path = folder / line.file
    if Path(line.file).name != line.file:
        raise CheckpointDamagedError(f"the manifest of {folder} names a file outside: {line.file}")
    try:
        _check_owner(path)
        raw, data = _map(path, line.bytes)
    except OSError as error:
        raise CheckpointDamagedError(
            f"shard {shard_id} cannot be read from {path} ({error.strerror}); take another "
            "checkpoint"
        ) from error
    return _verify(path, shard_id, line, manifest, raw, data)


def _verify(
    path: Path,
    shard_id: str,
    line: ShardFile,
    manifest: Manifest,
    raw: bytes,
    data: NDArray[np.uint8],
) -> ShardBytes:
    if st.header_digest(raw) != line.header_digest:
        raise CheckpointDamagedError(f"the header of {path} does not match the manifest's digest")
    header = st.unpack_header(raw, str(path))
    record = header.record
    named = (record.shard_id, record.snapshot, record.iteration, record.digest_root.hex())
    if named != (shard_id, manifest.snapshot, manifest.iteration, line.digest_root):
        raise CheckpointDamagedError(f"{path} holds another shard than the manifest names")
    if uuid.UUID(header.job) != manifest.job:
        raise CheckpointDamagedError(f"{path} is of another job than the manifest")
    try:
        return verified_shard(data, record, header.block_bytes, header.digest_algorithm, str(path))
    except SnapshotUnavailableError as error:
        raise CheckpointDamagedError(f"{error}; take another checkpoint") from error


def _map(path: Path, length: int) -> tuple[bytes, NDArray[np.uint8]]:
    """A file's header and, mapped, what follows it; its length must be ``length``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        if size != length:
            raise CheckpointDamagedError(f"{path} has {size} bytes, the manifest says {length}")
        start = st.header_length(os.pread(descriptor, st.LENGTH_BYTES, 0), str(path))
        if start > size:
            raise CheckpointDamagedError(f"{path} ends inside its header")
        raw = os.pread(descriptor, start, 0)
        mapping = Mapping(descriptor, 0, size, writable=False, name=str(path))
    finally:
        os.close(descriptor)
    return raw, mapping.view(np.uint8, start, size - start)
