"""Arena records as bytes, by the tables of docs/arena-format.md, and how they are stored.

All numbers are little-endian.  Packing raises ValueError for a value that does not fit its field;
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
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from megatron_ft.arena import format as fmt
from megatron_ft.arena.format import ArenaHeader, Geometry, Permit, SlotHeader, SlotState
from megatron_ft.core.errors import ArenaCorruptError, ArenaTruncatedError, ArenaVersionError
from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId

_TAG = struct.Struct("<QII")
COMMIT_WORD_BYTES = 16
ENVELOPE_BYTES = _TAG.size + COMMIT_WORD_BYTES
MAX_VERSION = (1 << 63) - 1
_READ_ATTEMPTS = 1000

KIND_HEADER, KIND_SLOT, KIND_PERMIT, KIND_PROGRESS = 1, 2, 3, 4


@dataclass(frozen=True)
class RecordPlace:
    """Place and kind of a record: file offset, bytes per copy and per payload, kind, index.

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
_HEADER = struct.Struct("<16s64sQ8I4Q")
_ANCESTOR = struct.Struct("<4Q")
_SEALED = struct.Struct("<64s2Qq5Q32s32s")
_SLOT = struct.Struct("<2I2Qq32s2I")
_PERMIT = struct.Struct("<2Qq2I")
_PROGRESS = struct.Struct("<q")

PREAMBLE_BYTES = _PREAMBLE.size
_MEMBERS_AT = _HEADER.size
_LINEAGE_AT = _MEMBERS_AT + fmt.MAX_MEMBERS * fmt.SHARD_ID_BYTES
HEADER_BYTES = _LINEAGE_AT + fmt.MAX_LINEAGE * _ANCESTOR.size
_TABLE_AT = _SLOT.size + _SEALED.size
SLOT_BYTES = _TABLE_AT + fmt.MAX_MEMBERS * _SEALED.size
PERMIT_BYTES = _PERMIT.size
PROGRESS_BYTES = _PROGRESS.size

_HAS_SNAPSHOT, _LOCAL_ONLY, _HAS_RECORD, _PARITY_VALID = 1, 2, 4, 8
_PRESENT, _REVOKED = 1, 2

_T = TypeVar("_T")


def _packing(what: str, pack: Callable[[], bytes]) -> bytes:
    try:
        return pack()
    except struct.error as error:
        raise ValueError(f"{what} holds a number that does not fit its field: {error}") from error


def _unpacking(what: str, parse: Callable[[], _T]) -> _T:
    # A hash is no signature: bytes that pass it may still be nonsense made on purpose.  A count
    # that is too high runs into the payload's end, which is one of these errors.
    try:
        return parse()
    except (ValueError, struct.error, IndexError) as error:
        raise ArenaCorruptError(f"{what} passes its hash but is not valid: {error}") from error


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


def _shard_id_bytes(shard_id: str) -> bytes:
    fmt.check_shard_id(shard_id)
    return shard_id.encode("ascii")


def _shard_id_from(raw: bytes) -> str:
    shard_id = raw.rstrip(b"\0").decode("ascii")
    fmt.check_shard_id(shard_id)
    return shard_id


def pack_sealed(record: SealedRecord) -> bytes:
    """192 bytes of one sealed record."""
    for name in ("layout_hash", "digest_root"):
        if len(getattr(record, name)) != fmt.HASH_BYTES:
            raise ValueError(f"{name} of {record.shard_id} has not {fmt.HASH_BYTES} bytes")
    values = (
        *record.snapshot,
        record.iteration,
        record.tensor_bytes,
        record.meta_offset,
        record.meta_bytes,
        record.digest_offset,
        record.used_bytes,
        record.layout_hash,
        record.digest_root,
    )
    place = _shard_id_bytes(record.shard_id)
    return _packing("a sealed record", lambda: _SEALED.pack(place, *values))


def _sealed_from(raw: bytes, offset: int) -> SealedRecord:
    name, incarnation, sequence, *values = _SEALED.unpack_from(raw, offset)
    return SealedRecord(_shard_id_from(name), SnapshotId(incarnation, sequence), *values)


def pack_header(header: ArenaHeader) -> bytes:
    """HEADER_BYTES bytes; of a longer lineage the newest 64 ancestors are kept."""
    lineage = header.lineage[-fmt.MAX_LINEAGE :]
    sizes = header.geometry
    fixed = _packing(
        "the arena header",
        lambda: _HEADER.pack(
            header.job.bytes,
            _shard_id_bytes(header.shard_id),
            header.incarnation,
            fmt.CODECS.index(header.codec),
            header.matrix,
            header.data_members,
            header.parity_members,
            header.member_index,
            len(header.members),
            header.digest_algorithm,
            len(lineage),
            sizes.slot_count,
            sizes.data_bytes,
            sizes.parity_bytes,
            sizes.block_bytes,
        ),
    )
    members = b"".join(_shard_id_bytes(m).ljust(fmt.SHARD_ID_BYTES, b"\0") for m in header.members)
    ancestors = _packing("the lineage", lambda: b"".join(_ancestor_bytes(a) for a in lineage))
    return (fixed + members).ljust(_LINEAGE_AT, b"\0") + ancestors.ljust(
        HEADER_BYTES - _LINEAGE_AT, b"\0"
    )


def _ancestor_bytes(ancestor: Ancestor) -> bytes:
    parent = ancestor.parent
    return _ANCESTOR.pack(ancestor.incarnation, parent is not None, *(parent or (0, 0)))


def _ancestor_from(raw: bytes, index: int) -> Ancestor:
    at = _LINEAGE_AT + index * _ANCESTOR.size
    incarnation, has_parent, *parent = _ANCESTOR.unpack_from(raw, at)
    return Ancestor(incarnation, SnapshotId(*parent) if has_parent else None)


def unpack_header(raw: bytes) -> ArenaHeader:
    """The arena header in HEADER_BYTES bytes; ArenaCorruptError if they are nonsense."""
    return _unpacking("the arena header", lambda: _header_from(raw))


def _header_from(raw: bytes) -> ArenaHeader:
    (job, name, incarnation, codec, matrix, k, m, index, count, algorithm, ancestors, *sizes) = (
        _HEADER.unpack_from(raw)
    )
    size = fmt.SHARD_ID_BYTES
    starts = range(_MEMBERS_AT, _MEMBERS_AT + count * size, size)
    return ArenaHeader(
        job=uuid.UUID(bytes=job),
        shard_id=_shard_id_from(name),
        incarnation=incarnation,
        lineage=tuple(_ancestor_from(raw, i) for i in range(ancestors)),
        codec=fmt.CODECS[codec],
        matrix=matrix,
        data_members=k,
        parity_members=m,
        member_index=index,
        members=tuple(_shard_id_from(raw[at : at + size]) for at in starts),
        digest_algorithm=algorithm,
        geometry=Geometry(*sizes),
    )


def pack_slot(header: SlotHeader) -> bytes:
    """SLOT_BYTES bytes of one slot header."""
    flags = (
        _HAS_SNAPSHOT * (header.snapshot is not None)
        | _LOCAL_ONLY * header.local_only
        | _HAS_RECORD * (header.record is not None)
        | _PARITY_VALID * header.parity_valid
    )
    fixed = _packing(
        "a slot header",
        lambda: _SLOT.pack(
            header.state,
            flags,
            *(header.snapshot or (0, 0)),
            header.iteration,
            header.parity_root,
            len(header.stripe_table),
            0,
        ),
    )
    record = b"" if header.record is None else pack_sealed(header.record)
    table = b"".join(pack_sealed(r) for r in header.stripe_table)
    return ((fixed + record).ljust(_TABLE_AT, b"\0") + table).ljust(SLOT_BYTES, b"\0")


def unpack_slot(raw: bytes) -> SlotHeader:
    """The slot header in SLOT_BYTES bytes; ArenaCorruptError if they are nonsense."""
    return _unpacking("a slot header", lambda: _slot_from(raw))


def _slot_from(raw: bytes) -> SlotHeader:
    state, flags, incarnation, sequence, iteration, root, count, _ = _SLOT.unpack_from(raw)
    table = (_sealed_from(raw, _TABLE_AT + i * _SEALED.size) for i in range(count))
    return SlotHeader(
        state=SlotState(state),
        snapshot=SnapshotId(incarnation, sequence) if flags & _HAS_SNAPSHOT else None,
        iteration=iteration,
        local_only=bool(flags & _LOCAL_ONLY),
        record=_sealed_from(raw, _SLOT.size) if flags & _HAS_RECORD else None,
        parity_valid=bool(flags & _PARITY_VALID),
        parity_root=root,
        stripe_table=tuple(table),
    )


def pack_permit(permit: Permit | None) -> bytes:
    """PERMIT_BYTES bytes; None is the withdrawn permit."""
    if permit is None:
        return bytes(PERMIT_BYTES)
    flags = _PRESENT | _REVOKED * permit.revoked
    values = (*permit.snapshot, permit.iteration, permit.slot, flags)
    return _packing("the permit", lambda: _PERMIT.pack(*values))


def unpack_permit(raw: bytes) -> Permit | None:
    """The permit in PERMIT_BYTES bytes, None if there is none."""
    incarnation, sequence, iteration, slot, flags = _PERMIT.unpack(raw)
    if not flags & _PRESENT:
        return None
    return Permit(SnapshotId(incarnation, sequence), iteration, slot, bool(flags & _REVOKED))


def pack_progress(iteration: int) -> bytes:
    """PROGRESS_BYTES bytes of the last finished iteration."""
    return _packing("progress", lambda: _PROGRESS.pack(iteration))


def unpack_progress(raw: bytes) -> int:
    """The last finished iteration in PROGRESS_BYTES bytes."""
    return int(_PROGRESS.unpack(raw)[0])
