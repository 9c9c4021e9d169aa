"""Records that survive a writer killed at any byte, and readers that never wait.

A record is stored twice.  Each copy has a version counter and a 16-byte hash over
itself, written last, as its commit word.  A write goes to the older copy first and
to the other one after that, so at every moment at least one copy is whole; a reader
takes the whole copy with the highest version.  There is one writer per record;
readers may be in any process and take no lock.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.core.errors import ArenaCorruptError

_TAG = struct.Struct("<QII")
COMMIT_WORD_BYTES = 16
ENVELOPE_BYTES = _TAG.size + COMMIT_WORD_BYTES
MAX_VERSION = (1 << 63) - 1
_READ_ATTEMPTS = 1000

KIND_HEADER, KIND_SLOT, KIND_PERMIT, KIND_PROGRESS = 1, 2, 3, 4


@dataclass(frozen=True)
class RecordPlace:
    """Where a record is: file offset, bytes per copy and per payload, and what it is.

    ``kind`` and ``index`` are part of the hashed bytes, so that a record found in
    another one's place is not taken for it.
    """

    offset: int
    copy_bytes: int
    payload_bytes: int
    kind: int
    index: int = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes of one copy that carry something: envelope and payload."""
        return ENVELOPE_BYTES + self.payload_bytes


Copies = tuple[bytes, bytes]


def _commit_word(tag: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(tag + payload, digest_size=COMMIT_WORD_BYTES).digest()


def parse_copy(raw: bytes, place: RecordPlace) -> tuple[int, bytes] | None:
    """Version and payload of one copy, or None if it is not whole."""
    if len(raw) != place.stored_bytes:
        return None
    tag, word, payload = raw[: _TAG.size], raw[_TAG.size : ENVELOPE_BYTES], raw[ENVELOPE_BYTES:]
    version, kind, index = _TAG.unpack(tag)
    if version > MAX_VERSION or (kind, index) != (place.kind, place.index):
        return None
    return (version, payload) if _commit_word(tag, payload) == word else None


def newest(copies: Copies, place: RecordPlace) -> tuple[int, bytes] | None:
    """Version and payload of the whole copy with the highest version; None without one."""
    whole = [parsed for raw in copies if (parsed := parse_copy(raw, place)) is not None]
    return max(whole, key=lambda parsed: parsed[0], default=None)


def _copy_stores(place: RecordPlace, copy: int, version: int, payload: bytes) -> list[Store]:
    tag = _TAG.pack(version, place.kind, place.index)
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
    assert len(payload) == place.payload_bytes, "a record's payload has a fixed length"
    versions = [parsed[0] if (parsed := parse_copy(raw, place)) else 0 for raw in copies]
    version = max(versions)
    if version > MAX_VERSION - 2:
        raise ArenaCorruptError(f"a record's version counter is {version}: it cannot go on")
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
