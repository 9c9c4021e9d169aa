"""Arena records as bytes (docs/reference/arena-format.md), and how they are stored.

A record's payload is MessagePack.  Packing raises ValueError for a number of more than 64 bits;
unpacking raises ArenaCorruptError for bytes that no writer of ours makes, whatever the bytes are.

Records survive a writer killed at any byte, and readers never wait.  A record is stored twice.
Each copy has a version counter and a 16-byte hash over itself, written last, as its commit word.
A write goes to the older copy first and to the other one after that, so at every moment at least
one copy is whole; a reader takes the whole copy with the highest version.  There is one writer per
record; readers may be in any process and take no lock.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from megatron_ft.arena import format as fmt
from megatron_ft.arena.format import ArenaHeader, Permit, SlotHeader
from megatron_ft.core.errors import (
    UNREADABLE,
    ArenaCorruptError,
    ArenaTruncatedError,
    ArenaVersionError,
)

_TAG = struct.Struct("<QIII")
COMMIT_WORD_BYTES = 16
ENVELOPE_BYTES = _TAG.size + COMMIT_WORD_BYTES
MAX_VERSION = (1 << 63) - 1
_READ_ATTEMPTS = 1000

KIND_HEADER, KIND_SLOT, KIND_PERMIT, KIND_PROGRESS = 1, 2, 3, 4


@dataclass(frozen=True)
class RecordPlace:
    """Place and kind of a record: file offset, bytes of room for each copy, kind, index.

    ``kind`` and ``index`` are part of the hashed bytes, so that a record found in
    another one's place is not taken for it.
    """

    offset: int
    copy_bytes: int
    kind: int
    index: int = 0


Copies = tuple[bytes, bytes]


def _commit_word(tag: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(tag + payload, digest_size=COMMIT_WORD_BYTES).digest()


def parse_copy(raw: bytes, place: RecordPlace) -> tuple[int, bytes] | None:
    """Version and payload of one copy, or None if it is not whole; bytes may follow it."""
    if len(raw) < ENVELOPE_BYTES:
        return None
    tag, word = raw[: _TAG.size], raw[_TAG.size : ENVELOPE_BYTES]
    version, kind, index, length = _TAG.unpack(tag)
    payload = raw[ENVELOPE_BYTES : ENVELOPE_BYTES + length]
    if version > MAX_VERSION or (kind, index) != (place.kind, place.index):
        return None
    return (version, payload) if _commit_word(tag, payload) == word else None


def newest(copies: Copies, place: RecordPlace) -> tuple[int, bytes] | None:
    """Version and payload of the whole copy with the highest version; None without one."""
    whole = [parsed for raw in copies if (parsed := parse_copy(raw, place)) is not None]
    return max(whole, key=lambda parsed: parsed[0], default=None)


def _copy_stores(place: RecordPlace, copy: int, version: int, payload: bytes) -> list[Store]:
    tag = _TAG.pack(version, place.kind, place.index, len(payload))
    at = place.offset + copy * place.copy_bytes
    return [
        Store(at + ENVELOPE_BYTES, payload),
        Store(at, tag),
        Store(at + _TAG.size, _commit_word(tag, payload)),
    ]


@dataclass(frozen=True)
class Store:
    """One write to the file: bytes and where they go."""

    offset: int
    raw: bytes


def plan_write(copies: Copies, place: RecordPlace, payload: bytes) -> list[Store]:
    """The stores, in order, that make ``payload`` the record, given its present copies.

    Cut off after any number of bytes they leave the old payload or the new one.
    Both copies end up holding the new one, so one damaged byte loses nothing later.
    """
    assert ENVELOPE_BYTES + len(payload) <= place.copy_bytes, "a record is larger than its place"
    versions = [parsed[0] if (parsed := parse_copy(raw, place)) else 0 for raw in copies]
    version = max(versions)
    if version > MAX_VERSION - 2:
        raise ArenaCorruptError(f"a record's version counter is {version}: it cannot increase")
    older = 0 if versions[0] <= versions[1] else 1
    return [
        *_copy_stores(place, older, version + 1, payload),
        *_copy_stores(place, 1 - older, version + 2, payload),
    ]


def read_settled(read: Callable[[], Copies], place: RecordPlace) -> bytes | None:
    """The record's payload while a writer may be at work; None if no copy is whole.

    A copy that is not whole is either being written now, so that what was read of the
    other one may be out of date, or was left by a killed writer.  Two equal readings
    in a row mean the latter.
    """
    previous: Copies | None = None
    for _ in range(_READ_ATTEMPTS):
        copies = read()
        parsed = [parse_copy(raw, place) for raw in copies]
        if None not in parsed or copies == previous:
            break
        previous = copies
    found = newest(copies, place)
    return None if found is None else found[1]


_PREAMBLE = struct.Struct("<8sII")
PREAMBLE_BYTES = _PREAMBLE.size


def pack_preamble() -> bytes:
    """Magic, byte order mark, format version."""
    return _PREAMBLE.pack(fmt.MAGIC, fmt.BYTE_ORDER_MARK, fmt.FORMAT_VERSION)


def check_preamble(raw: bytes, where: str) -> None:
    """Raise unless these first bytes of a file start an arena that this release can read."""
    if len(raw) < PREAMBLE_BYTES:
        raise ArenaTruncatedError(f"{where} has {len(raw)} bytes, too few for an arena")
    magic, mark, version = _PREAMBLE.unpack_from(raw)
    if magic != fmt.MAGIC:
        raise ArenaCorruptError(f"{where} starts with {magic!r}: it is not an arena; remove it")
    if mark == int.from_bytes(fmt.BYTE_ORDER_MARK.to_bytes(4, "little"), "big"):
        raise ArenaVersionError(
            f"{where} was written in big-endian byte order; this {sys.byteorder}-endian release "
            "reads little-endian arenas: use it on the machine that wrote it"
        )
    if mark != fmt.BYTE_ORDER_MARK:
        raise ArenaCorruptError(f"{where} has byte order mark {mark:#010x}: it is damaged")
    if version != fmt.FORMAT_VERSION:
        raise ArenaVersionError(
            f"{where} has format version {version}, this release reads {fmt.FORMAT_VERSION}: "
            "use the release that wrote it, or remove the arena"
        )


def pack_header(header: ArenaHeader) -> bytes:
    """The arena header; of a longer lineage the newest 64 ancestors are kept."""
    return pack(replace(header, lineage=header.lineage[-fmt.MAX_LINEAGE :]))


def unpack_header(raw: bytes) -> ArenaHeader:
    header: ArenaHeader = _unpack("the arena header", raw, ArenaHeader)
    return header


def unpack_slot(raw: bytes) -> SlotHeader:
    header: SlotHeader = _unpack("a slot header", raw, SlotHeader)
    return header


def unpack_permit(raw: bytes) -> Permit | None:
    permit: Permit | None = _unpack("the permit", raw, Permit | None)
    return permit


def unpack_progress(raw: bytes) -> int:
    iteration: int = _unpack("progress", raw, int)
    return iteration


def pack(value: SlotHeader | Permit | int | ArenaHeader | None) -> bytes:
    """A slot header, the permit (None is the withdrawn one), or the last finished iteration."""
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError as error:
        raise ValueError(f"a number in {value} has more than 64 bits") from error


def _unpack(what: str, raw: bytes, kind: Any) -> Any:
    # A hash is not a signature: bytes that pass it may still be nonsense made on purpose.
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except UNREADABLE as error:
        raise ArenaCorruptError(f"{what} passes its hash but is not valid: {error}") from error
