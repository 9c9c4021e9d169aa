"""Reading one shard's file, through read calls: a bad sector is an error, where a mapping
would end the process with SIGBUS.

Checkpoints that were drained, as a source to read from.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import digest
from megatron_ft.arena.mapping import Mapping
from megatron_ft.checkpoint import manifest as mf
from megatron_ft.checkpoint import safetensors as st
from megatron_ft.checkpoint.durable import Disk
from megatron_ft.checkpoint.manifest import NAME, Manifest, ShardFile
from megatron_ft.checkpoint.safetensors import ShardHeader
from megatron_ft.checkpoint.source import OpenSnapshot, ShardBytes, SnapshotInfo, take_apart
from megatron_ft.core import private_files
from megatron_ft.core.errors import (
    CheckpointDamagedError,
    ConfigError,
    SnapshotUnavailableError,
    UntrustedFileError,
)
from megatron_ft.core.identity import SealedRecord

PIECE_BYTES = 4 << 20
"""Most that is read at once; memory for reading does not grow with the shard."""

MOST_MANIFEST_BYTES = 256 << 20
"""Some 600 bytes a shard: far above any job."""


def check_folder(folder: Path) -> None:
    """CheckpointDamagedError unless a checkpoint's folder is this user's, and not open to all.

    Its group may write to it: what others put there is theirs, which shows when it is opened.
    """
    try:
        private_files.check_folder(folder, stat.S_IWOTH)
    except UntrustedFileError as error:
        raise CheckpointDamagedError(
            f"{error}; or copy the checkpoint and give the copy"
        ) from error
    except FileNotFoundError as error:
        raise CheckpointDamagedError(f"{folder} does not exist") from error


def open_trusted(path: Path, disk: Disk) -> int:
    """A descriptor of a checkpoint's file that nobody but this user can have written.

    What is read decides how training goes on, so the same is asked as of arenas, but that others
    may read it.  CheckpointDamagedError says what is wrong; OSError comes from the disk.
    """
    try:
        descriptor = disk.open(path)
    except OSError as error:
        reason = private_files.refusal(error)
        if not reason:
            raise
        raise CheckpointDamagedError(f"{path} {reason}") from error
    reason = private_files.reason_against(
        os.fstat(descriptor), forbidden=private_files.OTHERS_WRITE, links=True
    )
    if reason:
        os.close(descriptor)
        raise CheckpointDamagedError(f"{path} {reason}; or copy the checkpoint and give the copy")
    return descriptor


def read_manifest(folder: Path, disk: Disk | None = None) -> Manifest:
    """The manifest of a checkpoint that only we can have written; CheckpointDamagedError."""
    path = folder / NAME
    try:
        check_folder(folder)
        with open(open_trusted(path, disk or Disk()), "rb") as file:
            raw = file.read(MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{folder} has no {NAME}: it is no checkpoint, or one that was never finished"
        ) from error
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > MOST_MANIFEST_BYTES:
        raise CheckpointDamagedError(f"{path} has more than {MOST_MANIFEST_BYTES} bytes")
    return Manifest.from_json(raw, str(path))


@contextmanager
def open_shard(
    folder: Path, shard_id: str, manifest: Manifest, disk: Disk | None = None
) -> Iterator[ShardReader]:
    """Open one shard of a checkpoint; its header has been checked, its bytes have not.

    CheckpointDamagedError names the file, for whatever is wrong with it, the disk included.
    """
    line = manifest.shards[shard_id]
    path = folder / line.file
    if Path(line.file).name != line.file:
        raise CheckpointDamagedError(f"the manifest of {folder} names a file outside: {line.file}")
    disk = disk or Disk()
    try:
        descriptor = open_trusted(path, disk)
        try:
            yield ShardReader(path, descriptor, shard_id, line, manifest, disk)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointDamagedError(
            f"shard {shard_id} cannot be read from {path} ({error.strerror}); take another "
            "checkpoint"
        ) from error


class ShardReader:
    """One open file; ``start`` is where the sealed region begins in it."""

    def __init__(
        self,
        path: Path,
        descriptor: int,
        shard_id: str,
        line: ShardFile,
        manifest: Manifest,
        disk: Disk,
    ) -> None:
        self.path, self.descriptor, self._disk = path, descriptor, disk
        self.size = os.fstat(descriptor).st_size
        if self.size != line.bytes:
            raise CheckpointDamagedError(
                f"{path} has {self.size} bytes, the manifest says {line.bytes}"
            )
        self.start = st.header_length(self._read(0, st.LENGTH_BYTES), str(path))
        if self.start > self.size:
            raise CheckpointDamagedError(f"{path} ends inside its header")
        raw = self._read(0, self.start)
        if st.header_digest(raw) != line.header_digest:
            raise CheckpointDamagedError(
                f"the header of {path} does not match the manifest's digest"
            )
        self.header = st.unpack_header(raw, str(path))
        self._check_named(shard_id, line, manifest)

    @property
    def record(self) -> SealedRecord:
        """The sealed record, as the manifest names it."""
        return self.header.record

    def _check_named(self, shard_id: str, line: ShardFile, manifest: Manifest) -> None:
        record = self.record
        named = (record.shard_id, record.snapshot, record.iteration, record.digest_root.hex())
        if named != (shard_id, manifest.snapshot, manifest.iteration, line.digest_root):
            raise CheckpointDamagedError(f"{self.path} holds another shard than the manifest names")
        if self.header.job != str(manifest.job):
            raise CheckpointDamagedError(f"{self.path} is of another job than the manifest")
        if not digest.fits(self.size - self.start, record):
            raise CheckpointDamagedError(
                f"{self.path} is shorter than its record says, or the record is damaged"
            )

    def read_into(self, data: NDArray[np.uint8]) -> None:
        """Fill ``data``, which is as long as the region, and check all of it."""
        assert data.size == self.record.used_bytes
        self._fill_all(data)
        header = self.header
        bad = digest.verify_shard(data, self.record, header.block_bytes, header.digest_algorithm)
        if bad:
            raise self._damage(bad)

    def read_sealed_anew(
        self, data: NDArray[np.uint8], block_bytes: int, algorithm: int
    ) -> SealedRecord:
        """Fill a whole data region whose digests are of other blocks; the record of what is there.

        Every byte is checked by the digests in the file.  ArenaCapacityError if there is no room.
        """
        record, header, expected = self.record, self.header, self._table()
        region = data[: record.digest_offset]
        self._fill_all(region)
        sealed = digest.sealed_anew(data, record, block_bytes, algorithm)
        found = np.empty_like(expected)
        digest.digest_blocks(region, header.block_bytes, header.digest_algorithm, found)
        if bad := np.flatnonzero(found != expected).tolist():
            raise self._damage(bad)
        return sealed

    def verify(self) -> None:
        """Check every byte of the region; memory is one piece and the digest table."""
        bad = list(_bad_blocks(self, self._table(), self.header))
        if bad:
            raise self._damage(bad)

    def _table(self) -> NDArray[np.uint64]:
        """The digests of all blocks, which match their root."""
        header, record = self.header, self.record
        table = np.empty(record.used_bytes - record.digest_offset, np.uint8)
        self._fill(table, record.digest_offset)
        expected = table.view("<u8").astype(np.uint64)
        entries = digest.table_entries(record.digest_offset, header.block_bytes)
        if expected.size != entries or digest.digest_root(expected, record) != record.digest_root:
            raise self._damage(list(range(max(entries, 1))))
        return expected

    def _damage(self, bad: list[int]) -> CheckpointDamagedError:
        record, block = self.record, self.header.block_bytes
        return CheckpointDamagedError(
            f"shard {record.shard_id} of snapshot {record.snapshot} in {self.path}: {len(bad)} of "
            f"its blocks of {block} bytes do not match their digests ({digest.name_blocks(bad)}); "
            "take another checkpoint"
        )

    def _read(self, at: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._exactly(memoryview(buffer), at)
        return bytes(buffer)

    def _fill_all(self, data: NDArray[np.uint8]) -> None:
        for at in range(0, data.size, PIECE_BYTES):
            self._fill(data[at : at + PIECE_BYTES], at)

    def _fill(self, data: NDArray[np.uint8], at: int) -> None:
        """Bytes of the region from ``at`` on."""
        self._exactly(data.data, self.start + at)

    def _exactly(self, rest: memoryview, at: int) -> None:
        while rest:
            count = self._disk.read(self.descriptor, rest, at)
            if not count:
                raise CheckpointDamagedError(f"{self.path} became shorter while it was read")
            rest, at = rest[count:], at + count


def _bad_blocks(
    reader: ShardReader, expected: NDArray[np.uint64], header: ShardHeader
) -> Iterator[int]:
    block = header.block_bytes
    blocks = max(1, PIECE_BYTES // block)
    buffer = np.empty(min(blocks * block, max(1, reader.record.digest_offset)), np.uint8)
    for first in range(0, expected.size, blocks):
        wanted = expected[first : first + blocks]
        start = first * block
        piece = buffer[: min(blocks * block, reader.record.digest_offset - start)]
        reader._fill(piece, start)
        found = np.empty_like(wanted)
        digest.digest_blocks(piece, block, header.digest_algorithm, found)
        yield from (first + int(number) for number in np.flatnonzero(found != wanted))


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
