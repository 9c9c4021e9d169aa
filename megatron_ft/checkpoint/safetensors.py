"""One shard as a safetensors file: a header of ours before the sealed region as it is.

The format (huggingface/safetensors, format description): u64 length of the header, JSON
header, bytes.  It allows no holes, so gaps between tensors, the packed layout and objects,
and the digest table are uint8 tensors with names of ours.  Because the region is stored
unchanged, a file is verified by the same digests as an arena.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from megatron_ft.arena.format import DIGEST_BLAKE2B, DIGEST_CRC64, MAX_REGION_BYTES
from megatron_ft.core.decoding import UNREADABLE
from megatron_ft.core.errors import CheckpointDamagedError, DrainError
from megatron_ft.core.identity import SealedRecord, ShardPlacement
from megatron_ft.core.shard import ALIGNMENT, LayoutEntry, ShardLayout, align

FORMAT = "megatron-ft shard"
FORMAT_VERSION = 1
OWN_PREFIX = "__megatron_ft__."
META, DIGESTS, GAP = f"{OWN_PREFIX}meta", f"{OWN_PREFIX}digests", f"{OWN_PREFIX}gap"
LENGTH_BYTES = 8
MOST_HEADER_BYTES = 100 << 20
"""What stock readers accept."""

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Our dtype names to theirs; a tensor of any other dtype is stored as its bytes."""


class Whole(msgspec.Struct, frozen=True):
    """What a tensor is in the shard, where the file's own entry does not say it all.

    ``start`` and ``stop`` are the stored elements of the flattened tensor; ``alias_of`` and
    ``offset`` say where the bytes of a tensor are that has no entry of its own.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    alias_of: str
    offset: int


class ShardHeader(msgspec.Struct, frozen=True):
    """What our part of a header says; kept as JSON texts in ``__metadata__``."""

    record: SealedRecord
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_REGION_BYTES)]
    digest_algorithm: Annotated[int, msgspec.Meta(ge=DIGEST_CRC64, le=DIGEST_BLAKE2B)]
    job: str
    seat: ShardPlacement | None = None


def pack_header(header: ShardHeader, layout: ShardLayout) -> bytes:
    """Length and JSON, padded so that the region starts at a multiple of 64 bytes."""
    entries: dict[str, Any] = {"__metadata__": _metadata(header, layout)}
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
        known = (metadata["format"], metadata["version"]) == (FORMAT, str(FORMAT_VERSION))
        if known:
            return msgspec.json.decode(metadata["shard"], type=ShardHeader)
    except (*UNREADABLE, KeyError, TypeError) as error:
        raise CheckpointDamagedError(f"the header of {where} is damaged: {error}") from error
    raise CheckpointDamagedError(
        f"{where} has format {metadata['format']!r}, version {metadata['version']}; this release "
        f"reads {FORMAT!r}, version {FORMAT_VERSION}"
    )


def _metadata(header: ShardHeader, layout: ShardLayout) -> dict[str, str]:
    """All values are texts, as the format wants."""
    described = {e.name: _whole(e) for e in layout.entries if not _says_all(e)}
    return {
        "format": FORMAT,
        "version": str(FORMAT_VERSION),
        "shard": msgspec.json.encode(header).decode(),
        "tensors": msgspec.json.encode(described).decode(),
    }


def _says_all(entry: LayoutEntry) -> bool:
    return not entry.alias_of and not entry.is_split and entry.dtype in DTYPES


def _whole(entry: LayoutEntry) -> Whole:
    return Whole(entry.dtype, entry.shape, entry.start, entry.stop, entry.alias_of, entry.offset)


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
