"""Reads checkpoints back: as a source to read from, and into the arenas of a node.

``python -m megatron_ft.checkpoint.load load PLAN`` is a short-lived process, one on each node
that lacks shards.  To its SMP it is an encoder world of its own: it is watched and fenced as one,
and what it has not finished when it dies is free again.

Bytes come through read calls: a bad sector is an error, where a mapping would end the process
with SIGBUS.
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena import digest
from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import SlotState
from megatron_ft.arena.mapping import Mapping
from megatron_ft.checkpoint import disk_format
from megatron_ft.checkpoint.disk_format import MANIFEST, DiskCalls, Manifest, ShardFile
from megatron_ft.checkpoint.source import ShardBytes, describe_damage, take_apart
from megatron_ft.core import private_files
from megatron_ft.core.environment import ProcessEnvironment
from megatron_ft.core.errors import (
    CheckpointDamagedError,
    ControlPlaneError,
    DrainError,
    MegatronFTError,
    SnapshotUnavailableError,
    UntrustedFileError,
)
from megatron_ft.core.identity import SealedRecord, SnapshotId
from megatron_ft.rpc import messages as m
from megatron_ft.rpc.local_query import ask
from megatron_ft.smp.store import SUFFIX

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Most that is read at once; memory for reading does not grow with the shard."""

MOST_MANIFEST_BYTES = 256 << 20
"""Limit of a manifest, far above that of any job; a shard takes some 600 bytes."""

LEVEL = "durable"
EXIT_FAILED = 1
EXIT_DAMAGED = 3
"""Exit status when the checkpoint is at fault: another one has to be taken."""

ANSWER_SECONDS = 60.0


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


def open_trusted(path: Path, disk: DiskCalls) -> int:
    """A descriptor of a checkpoint's file that nobody but this user can have written.

    The bytes decide how training continues, so the same is asked as of arenas, but that others
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


def read_manifest(folder: Path, disk: DiskCalls | None = None) -> Manifest:
    """The manifest of a checkpoint that only we can have written; CheckpointDamagedError."""
    path = folder / MANIFEST
    try:
        check_folder(folder)
        with open(open_trusted(path, disk or DiskCalls()), "rb") as file:
            raw = file.read(MOST_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointDamagedError(
            f"{folder} has no {MANIFEST}: it is not a checkpoint, or one that was never finished"
        ) from error
    except OSError as error:
        raise CheckpointDamagedError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) > MOST_MANIFEST_BYTES:
        raise CheckpointDamagedError(f"{path} has more than {MOST_MANIFEST_BYTES} bytes")
    return Manifest.from_json(raw, str(path))


@contextmanager
def open_shard(
    folder: Path, shard_id: str, manifest: Manifest, disk: DiskCalls | None = None
) -> Iterator[ShardReader]:
    """Open one shard of a checkpoint; its header has been checked, its bytes have not.

    CheckpointDamagedError names the file, for whatever is wrong with it, the disk included.
    """
    line = manifest.shards[shard_id]
    path = folder / line.file
    if Path(line.file).name != line.file:
        raise CheckpointDamagedError(f"the manifest of {folder} names a file outside: {line.file}")
    disk = disk or DiskCalls()
    try:
        descriptor = open_trusted(path, disk)
        try:
            reader = ShardReader(path, descriptor, line, disk)
            reader.check_named(shard_id, line, manifest)
            yield reader
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointDamagedError(
            f"shard {shard_id} cannot be read from {path} ({error.strerror}); take another "
            "checkpoint"
        ) from error


class ShardReader:
    """One open file of a shard; the sealed region begins at ``start`` in it."""

    def __init__(self, path: Path, descriptor: int, line: ShardFile, disk: DiskCalls) -> None:
        """CheckpointDamagedError if length or header are not as the manifest's ``line`` says."""
        self.path, self.descriptor, self._disk = path, descriptor, disk
        self.size = os.fstat(descriptor).st_size
        if self.size != line.bytes:
            raise CheckpointDamagedError(
                f"{path} has {self.size} bytes, the manifest says {line.bytes}"
            )
        self.start = disk_format.header_length(self._head(disk_format.LENGTH_BYTES), str(path))
        raw = self._head(self.start)
        if disk_format.header_digest(raw) != line.header_digest:
            raise CheckpointDamagedError(
                f"the header of {path} does not match the manifest's digest"
            )
        self.header = disk_format.unpack_header(raw, str(path))
        self.record: SealedRecord = self.header.record
        self._block_bytes = self.header.block_bytes

    def check_named(self, shard_id: str, line: ShardFile, manifest: Manifest) -> None:
        """CheckpointDamagedError unless this is the shard that the manifest names."""
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
        for at in range(0, data.size, PIECE_BYTES):
            self._read(data[at : at + PIECE_BYTES].data, self.start + at)
        if bad := digest.verify_shard(data, self.record, self._block_bytes):
            raise self._damage(bad)

    def read_range(self, start: int, stop: int) -> NDArray[np.uint8]:
        """These bytes of the region; CheckpointDamagedError if their blocks are damaged."""
        block = self._block_bytes
        first, end = start // block, min(-(-stop // block) * block, self.record.digest_offset)
        blocks = np.empty(max(0, end - first * block), np.uint8)
        self._read(blocks.data, self.start + first * block)
        known = self._table[first : digest.table_entries(end, block)]
        if bad := digest.wrong_blocks(blocks, first, known, block):
            raise self._damage(bad)
        return blocks[start - first * block : stop - first * block]

    def verify(self) -> None:
        """Check every byte of the region; memory is one piece and the digest table."""
        block, end, expected = self.header.block_bytes, self.record.digest_offset, self._table
        blocks = max(1, PIECE_BYTES // block)
        buffer = np.empty(min(blocks * block, max(1, end)), np.uint8)
        bad: list[int] = []
        for first in range(0, expected.size, blocks):
            piece = buffer[: min(blocks * block, end - first * block)]
            self._read(piece.data, self.start + first * block)
            known = expected[first : first + blocks]
            bad += digest.wrong_blocks(piece, first, known, self._block_bytes)
        if bad:
            raise self._damage(bad)

    @cached_property
    def _table(self) -> NDArray[np.uint64]:
        """The digests of all blocks, which match their root."""
        record = self.record
        table = np.empty(record.used_bytes - record.digest_offset, np.uint8)
        self._read(table.data, self.start + record.digest_offset)
        expected = table.view("<u8").astype(np.uint64)
        entries = digest.table_entries(record.digest_offset, self.header.block_bytes)
        if expected.size != entries or digest.digest_root(expected, record) != record.digest_root:
            raise self._damage(list(range(max(entries, 1))))
        return expected

    def _damage(self, bad: list[int]) -> CheckpointDamagedError:
        where = describe_damage(self.record, bad, self._block_bytes, str(self.path))
        return CheckpointDamagedError(f"{where}; take another checkpoint")

    def _head(self, length: int) -> bytes:
        head = bytearray(length)
        self._read(memoryview(head), 0)
        return bytes(head)

    def _read(self, rest: memoryview, at: int) -> None:
        while rest:
            count = self._disk.read(self.descriptor, rest, at)
            if not count:
                raise CheckpointDamagedError(f"{self.path} became shorter while it was read")
            rest, at = rest[count:], at + count


def open_bytes(folder: Path, shard_id: str, manifest: Manifest) -> ShardBytes:
    """Every byte is checked through read calls; what is mapped is in the page cache then."""
    with open_shard(folder, shard_id, manifest) as reader:
        reader.verify()
        mapping = Mapping(reader.descriptor, 0, reader.size, writable=False, name=str(reader.path))
        data = mapping.view(np.uint8, reader.start, reader.record.used_bytes)
        header, path = reader.header, str(reader.path)
    try:
        return take_apart(data, header.record, header.block_bytes, path)
    except SnapshotUnavailableError as error:
        raise CheckpointDamagedError(f"{error}; take another checkpoint") from error


PlanT = TypeVar("PlanT", bound="ProcessPlan")


class ProcessPlan(msgspec.Struct, frozen=True):
    """Work of a short-lived process: its only argument, as JSON."""

    def to_json(self) -> str:
        return msgspec.json.encode(self, enc_hook=str).decode()

    @classmethod
    def from_json(cls: type[PlanT], text: str) -> PlanT:
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


class LoadPlan(ProcessPlan, frozen=True):
    """Work of one node: to load these shards of one checkpoint, as the world of this name."""

    folder: Path
    snapshot: SnapshotId
    shards: tuple[str, ...]
    world: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Load.  Exit codes: 0 done, 1 failed, 3 the checkpoint is damaged; the last line says why."""
    parser = argparse.ArgumentParser(prog="python -m megatron_ft.checkpoint.load")
    parser.add_argument("step", choices=["load"])
    parser.add_argument("plan", type=LoadPlan.from_json)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        load(options.plan, ProcessEnvironment.from_env())
    except CheckpointDamagedError as error:
        log.error("%s", error)
        return EXIT_DAMAGED
    except (MegatronFTError, OSError) as error:
        log.error("%s", error)
        return EXIT_FAILED
    return 0


def load(plan: LoadPlan, environment: ProcessEnvironment, disk: DiskCalls | None = None) -> None:
    """Fill the slot that waits for each shard, and report it to the SMP of this node."""
    # Before anything is mapped: who may write must be known to who fences writers.
    _tell(environment, m.EncoderHello(os.getpid(), plan.world, environment.incarnation))
    manifest = read_manifest(plan.folder)
    if manifest.snapshot != plan.snapshot:
        raise CheckpointDamagedError(f"{plan.folder} is of snapshot {manifest.snapshot}")
    for shard_id in plan.shards:
        path = environment.node_dir / f"{shard_id}{SUFFIX}"
        record = fill(path, plan.folder, shard_id, manifest, disk)
        _tell(environment, m.Loaded(plan.world, record))
        log.info("loaded %d bytes of %s from %s", record.used_bytes, shard_id, plan.folder)


def fill(
    path: Path, folder: Path, shard_id: str, manifest: Manifest, disk: DiskCalls | None = None
) -> SealedRecord:
    """Copy one shard into the slot of its arena that waits for it; the record of what is there.

    Every byte is checked after it was copied.  CheckpointDamagedError names what is wrong
    with the file; DrainError if the arena is not one that can take it.
    """
    with Arena.open(path) as arena, open_shard(folder, shard_id, manifest, disk) as reader:
        data = arena.data(_waiting_slot(arena, manifest.snapshot), writable=True)
        here, there = arena.geometry.block_bytes, reader.header.block_bytes
        if here != there:
            raise CheckpointDamagedError(
                f"{reader.path} has digests of blocks of {there} bytes, {path} of {here}: export "
                "the checkpoint with the release that wrote it, and start from the export"
            )
        used = reader.record.used_bytes
        if used > data.size:
            raise DrainError(f"{path} has room for {data.size} bytes, {reader.path} holds {used}")
        reader.read_into(data[:used])
        return reader.record


def _waiting_slot(arena: Arena, snapshot: SnapshotId) -> int:
    for slot in range(arena.geometry.slot_count):
        header = arena.slot(slot)
        if (header.state, header.snapshot) == (SlotState.REBUILDING, snapshot):
            return slot
    raise DrainError(f"no slot of {arena.path} waits for snapshot {snapshot}")


def _tell(environment: ProcessEnvironment, message: m.Message) -> None:
    answer: Any = ask(environment.socket, message, ANSWER_SECONDS)
    if isinstance(answer, m.Refused):
        raise answer.error
    if not isinstance(answer, m.Ok | m.EncoderWelcome):
        raise ControlPlaneError(f"the SMP answered {type(answer).__name__} to a loader")


if __name__ == "__main__":
    sys.exit(main())
