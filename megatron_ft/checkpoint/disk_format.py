"""Form of a checkpoint on disk: durable files, the manifest, one safetensors file a shard.

A checkpoint is a folder.  Its manifest is written last and removed first, so a folder that has
one is complete.  Every file is there in full after a power loss, or not at all.

A shard's file is a header of ours before the sealed region as it is.  The format
(huggingface/safetensors, format description) is: u64 length of the header, JSON header, bytes.
It allows no holes, so gaps between tensors, the packed layout and objects, and the digest table
are uint8 tensors with names of ours.  Because the region is stored unchanged, a file is verified
by the same digests as an arena.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from megatron_ft.arena.format import MAX_REGION_BYTES
from megatron_ft.core.errors import UNREADABLE, CheckpointDamagedError, DrainError
from megatron_ft.core.identity import Ancestor, SealedRecord, ShardPlacement, SnapshotId
from megatron_ft.core.shard import ALIGNMENT, LayoutEntry, ShardLayout, align

TEMPORARY_SUFFIX = ".tmp"
FILE_MODE, FOLDER_MODE = 0o644, 0o775
"""Modes less the umask: the user decides who may read a checkpoint; others never write."""
SYNC_BYTES = 64 << 20
"""Written data are flushed in portions of this size, so that they never fill the page cache."""


def mount_point(folder: Path) -> Path:
    """The folder on which the file system is mounted that holds ``folder``; "/" at last."""
    real = folder.resolve()
    return next(one for one in (real, *real.parents) if os.path.ismount(one))


class DiskCalls:
    """The system calls of a drain, one method for each that can fail or be the last one before a
    crash; tests stop it at each of them.  OSError passes through: full, read-only, broken."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; the names are durable on return."""
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        for one in reversed(missing):
            one.mkdir(mode=FOLDER_MODE, exist_ok=True)
            self.sync_folder(one.parent)

    def write_file(self, path: Path, pieces: Iterable[Any]) -> None:
        """Make or replace a file of these pieces (buffers of bytes), durable on return.

        Nothing is ever seen under ``path`` but the old file or the whole new one.
        """
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}")
        descriptor = self.create(temporary)
        try:
            try:
                self._fill(descriptor, pieces)
            finally:
                os.close(descriptor)
            self.rename(temporary, path)
        except BaseException:
            with suppress(OSError):
                self.remove(temporary)
            raise
        self.sync_folder(path.parent)

    def _fill(self, descriptor: int, pieces: Iterable[Any]) -> None:
        unsynced = 0
        for piece in pieces:
            rest = memoryview(piece).cast("B")
            unsynced += len(rest)
            while rest:
                rest = rest[self.write(descriptor, rest) :]
            if unsynced >= SYNC_BYTES:
                self.sync(descriptor)
                unsynced = 0
        self.sync(descriptor)

    def create(self, path: Path) -> int:
        """Open a file that does not exist yet for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def open(self, path: Path) -> int:
        """Open a file for reading; links are refused, and a FIFO is not waited for."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def read(self, descriptor: int, buffer: memoryview, at: int) -> int:
        """Read some bytes of the file from ``at`` on into ``buffer``; how many, 0 at its end."""
        return os.preadv(descriptor, [buffer], at)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of ``data``; how much."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file its final name, over one that has it."""
        os.rename(old, new)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, folder: Path) -> None:
        os.rmdir(folder)


MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
SHARD_SUFFIX = ".safetensors"

_FOLDER = re.compile(r"iter_(\d{7,})-(\d+)\.(\d+)-([0-9a-f]{8})")


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One shard's file: its name in the folder, its length, and digests of every byte.

    ``header_digest`` is of the header (header_digest), ``digest_root`` the sealed
    record's for all that follows, both as hex.  ``seat`` is where the shard belongs in the
    job; without one (unknown to the drain) no job can start from the file.
    """

    file: str
    bytes: int
    header_digest: str
    digest_root: str
    seat: ShardPlacement | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One checkpoint.  ``snapshot`` is (incarnation, sequence), ``shards`` go by shard id.

    ``level`` is how the snapshot was protected in memory when it was drained; ``created``
    is UTC in ISO 8601; ``digest`` is of all the other fields.
    """

    format_version: int
    job: uuid.UUID
    snapshot: SnapshotId
    iteration: int
    level: str
    lineage: tuple[Ancestor, ...]
    created: str
    shards: dict[str, ShardFile]
    digest: str = ""

    def to_json(self) -> bytes:
        """The file's content, with its digest."""
        signed = msgspec.structs.replace(self, digest=self._digest())
        return msgspec.json.format(msgspec.json.encode(signed), indent=1) + b"\n"

    def _digest(self) -> str:
        """BLAKE2b-16 of the compact JSON with an empty digest."""
        raw = msgspec.json.encode(msgspec.structs.replace(self, digest=""))
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @classmethod
    def from_json(cls, raw: bytes, where: str) -> Manifest:
        """The manifest in a file's content; CheckpointDamagedError if it is not a whole one."""
        version = _version(raw)
        if version not in (None, MANIFEST_VERSION):
            raise CheckpointDamagedError(
                f"{where} has format version {version}, this release reads {MANIFEST_VERSION}"
            )
        try:
            manifest = msgspec.json.decode(raw, type=cls)
        except UNREADABLE as error:
            raise CheckpointDamagedError(f"{where} is damaged: {error}") from error
        if manifest.digest != manifest._digest():
            raise CheckpointDamagedError(
                f"{where} does not match its own digest: it was changed after it was written"
            )
        return manifest


def _version(raw: bytes) -> object:
    try:
        found = msgspec.json.decode(raw)
    except UNREADABLE:
        return None
    return found.get("format_version") if isinstance(found, dict) else None


def is_complete(folder: Path) -> bool:
    """True if a folder is a checkpoint, damaged or not: the manifest comes last and goes first."""
    return (folder / MANIFEST).exists()


def folder_name(job: uuid.UUID, iteration: int, snapshot: SnapshotId) -> str:
    """``iter_0000020-1.7-00c0ffee``: iteration, snapshot id, the start of the job's uuid."""
    return f"iter_{iteration:07d}-{snapshot}-{job.hex[:8]}"


def is_checkpoint_name(name: str, job: uuid.UUID | None = None) -> bool:
    """True if a folder's name is one that folder_name makes, for this job if one is given."""
    match = _FOLDER.fullmatch(name)
    return match is not None and (job is None or match[4] == job.hex[:8])


SHARD_FORMAT = "megatron-ft shard"
SHARD_VERSION = 1
OWN_PREFIX = "__megatron_ft__."
META, DIGESTS, GAP = f"{OWN_PREFIX}meta", f"{OWN_PREFIX}digests", f"{OWN_PREFIX}gap"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100 << 20
"""Limit of stock readers."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Our dtype names to theirs; a tensor of any other dtype is stored as its bytes."""


class ShardHeader(msgspec.Struct, frozen=True):
    """Our part of a header; kept as JSON texts in ``__metadata__``."""

    record: SealedRecord
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_REGION_BYTES)]
    job: str
    seat: ShardPlacement | None = None


def pack_header(header: ShardHeader, layout: ShardLayout) -> bytes:
    """Length and JSON, padded so that the region starts at a multiple of 64 bytes."""
    # All values are texts, as the format wants.
    metadata = {
        "format": SHARD_FORMAT,
        "version": str(SHARD_VERSION),
        "shard": msgspec.json.encode(header).decode(),
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    for name, dtype, shape, start, stop in _table(layout, header.record):
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, stop)}
    text = msgspec.json.encode(entries)
    padded = align(LENGTH_BYTES + len(text)) - LENGTH_BYTES
    if padded > MOST_HEADER_BYTES:
        raise DrainError(
            f"shard {header.record.shard_id} has so many tensors that its header needs {padded} "
            f"bytes; stock readers take {MOST_HEADER_BYTES}"
        )
    return struct.pack("<Q", padded) + text.ljust(padded)


def header_digest(raw: bytes) -> str:
    """BLAKE2b-32 of length and header as hex; the bytes behind them have the digest root."""
    return hashlib.blake2b(raw, digest_size=32).hexdigest()


def header_length(start: bytes, where: str) -> int:
    """Bytes before the region, from a file's first 8 bytes."""
    if len(start) == LENGTH_BYTES:
        (length,) = struct.unpack("<Q", start)
        if 0 < length <= MOST_HEADER_BYTES and (length + LENGTH_BYTES) % ALIGNMENT == 0:
            return LENGTH_BYTES + int(length)
    raise CheckpointDamagedError(f"{where} does not start like a shard that was drained")


def unpack_header(raw: bytes, where: str) -> ShardHeader:
    """Our part of a header; CheckpointDamagedError if there is none or it is of another release."""
    try:
        metadata = msgspec.json.decode(raw[LENGTH_BYTES:])["__metadata__"]
        known = (metadata["format"], metadata["version"]) == (SHARD_FORMAT, str(SHARD_VERSION))
        if known:
            return msgspec.json.decode(metadata["shard"], type=ShardHeader)
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"the header of {where} is damaged: {error}") from error
    raise CheckpointDamagedError(
        f"{where} has format {metadata['format']!r}, version {metadata['version']}; this release "
        f"reads {SHARD_FORMAT!r}, version {SHARD_VERSION}"
    )


_Row = tuple[str, str, tuple[int, ...], int, int]


def _table(layout: ShardLayout, record: SealedRecord) -> Iterator[_Row]:
    """Name, dtype, shape, start and end of everything in the region, in order, no holes."""
    at, gaps = 0, 0
    meta_end = record.meta_offset + record.meta_bytes
    words = (record.used_bytes - record.digest_offset) // 8
    rows = [_row(entry) for entry in layout.entries if not entry.alias_of]
    rows.append((META, "U8", (record.meta_bytes,), record.meta_offset, meta_end))
    rows.append((DIGESTS, "U64", (words,), record.digest_offset, record.used_bytes))
    for row in sorted(rows, key=lambda row: row[3:]):
        start = row[3]
        assert start >= at, f"{row[0]} lies inside another tensor of {record.shard_id}"
        if start > at:
            yield f"{GAP}{gaps}", "U8", (start - at,), at, start
            gaps += 1
        yield row
        at = row[4]


def _row(entry: LayoutEntry) -> _Row:
    if entry.name.startswith((OWN_PREFIX, "__metadata__")):
        raise DrainError(f"a tensor is called {entry.name!r}; the disk format needs that name")
    shape = (entry.stop - entry.start,) if entry.is_split else entry.shape
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        dtype, shape = "U8", (entry.nbytes,)
    return entry.name, dtype, shape, entry.offset, entry.offset + entry.nbytes
