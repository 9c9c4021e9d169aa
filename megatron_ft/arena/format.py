"""Contents of an arena file and their places: constants, geometry, values of its records.

Values are packed by ``binary.py``; docs/reference/arena-format.md has the format.  Every
``ValueError`` here names the field.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from enum import IntEnum

from megatron_ft.core.identity import Ancestor, SealedRecord, SnapshotId

MAGIC = b"MFTARENA"
FORMAT_VERSION = 3
BYTE_ORDER_MARK = 0x0A0B0C0D
PAGE_BYTES = 4096

HEADER_OFFSET = 4096
HEADER_COPY_BYTES = 8192
PERMIT_OFFSET = 20480
PROGRESS_OFFSET = 24576
WORD_COPY_BYTES = 2048
SLOT_HEADERS_OFFSET = 32768
SLOT_COPY_BYTES = 16384

MAX_SLOTS = 8
MAX_MEMBERS = 64
MAX_LINEAGE = 64
HASH_BYTES = 32
ZERO_HASH = bytes(HASH_BYTES)
# Far above any machine, far below what would overflow an offset of type off_t.
MAX_REGION_BYTES = 1 << 56

BLOCK_BYTES = 512 << 10
"""Bytes under one digest in new arenas.  Each digest costs a call, and a trainer's copy thread
waits for Python's lock after every call."""

CODECS = ("none", "xor", "rs", "replica")

_SHARD_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}")


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def check_shard_id(shard_id: str) -> None:
    """ValueError unless the id is 1 to 64 of ``A-Z a-z 0-9 _ - .``, since it names a file."""
    if not _SHARD_ID.fullmatch(shard_id):
        raise ValueError(
            f"shard id {shard_id!r}: use 1 to 64 letters, digits, '_', '-' or '.', "
            "not starting with '-' or '.'"
        )


class SlotState(IntEnum):
    """State of a slot; see section "Slot states" of docs/reference/arena-format.md."""

    FREE = 0
    CAPTURING = 1
    SEALED = 2
    ENCODING = 3
    PROTECTED = 4
    COMMITTED = 5
    REBUILDING = 6


@dataclass(frozen=True)
class Geometry:
    """Sizes of an arena and the places of its regions, all in bytes from the file's start.

    ``data_bytes`` and ``parity_bytes`` are per slot; every region starts on a
    4096-byte page.  The file is: fixed records, slot headers, then per slot
    data, parity and the digests of the parity's blocks.
    """

    slot_count: int
    data_bytes: int
    parity_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        if not 1 <= self.slot_count <= MAX_SLOTS:
            raise ValueError(f"slot_count is {self.slot_count}; use 1 to {MAX_SLOTS}")
        for name, least in (("data_bytes", 1), ("parity_bytes", 0), ("block_bytes", 1)):
            if not least <= getattr(self, name) <= MAX_REGION_BYTES:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; use {least} to {MAX_REGION_BYTES} bytes"
                )

    @classmethod
    def for_stripe(
        cls,
        *,
        slot_count: int,
        required_bytes: int,
        data_members: int,
        parity_members: int,
        block_bytes: int,
    ) -> Geometry:
        """Geometry of a stripe's arenas: data padded to whole blocks in each of k chunks."""
        data_bytes = round_up(max(required_bytes, 1), data_members * block_bytes)
        return cls(slot_count, data_bytes, parity_members * data_bytes // data_members, block_bytes)

    @property
    def parity_blocks(self) -> int:
        return -(-self.parity_bytes // self.block_bytes)

    @property
    def control_bytes(self) -> int:
        """Bytes before the first slot's data: fixed records and slot headers."""
        return SLOT_HEADERS_OFFSET + self.slot_count * 2 * SLOT_COPY_BYTES

    @property
    def slot_span(self) -> int:
        """Bytes from one slot's data to the next one's."""
        return self._parity_digest_start + round_up(8 * self.parity_blocks, PAGE_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.control_bytes + self.slot_count * self.slot_span

    def slot_header_offset(self, slot: int) -> int:
        return SLOT_HEADERS_OFFSET + self._checked(slot) * 2 * SLOT_COPY_BYTES

    def data_offset(self, slot: int) -> int:
        return self.control_bytes + self._checked(slot) * self.slot_span

    def parity_offset(self, slot: int) -> int:
        return self.data_offset(slot) + round_up(self.data_bytes, PAGE_BYTES)

    def parity_digest_offset(self, slot: int) -> int:
        return self.data_offset(slot) + self._parity_digest_start

    @property
    def _parity_digest_start(self) -> int:
        return round_up(self.data_bytes, PAGE_BYTES) + round_up(self.parity_bytes, PAGE_BYTES)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"slot {slot} does not exist; the arena has {self.slot_count}")
        return slot


@dataclass(frozen=True)
class ArenaHeader:
    """Owner of an arena (job, shard, stripe) and the protection of its bytes.

    ``lineage`` has the newest ancestor last, the last one being this incarnation with
    the snapshot it started from; only the newest 64 are stored.  ``members`` are the
    shard ids of the stripe in order, k + m of them, this shard at ``member_index``.
    ``codec`` is one of "none", "xor", "rs", "replica".
    Inconsistent values raise ValueError.
    """

    job: uuid.UUID
    shard_id: str
    incarnation: int
    lineage: tuple[Ancestor, ...]
    codec: str
    data_members: int
    parity_members: int
    member_index: int
    members: tuple[str, ...]
    geometry: Geometry

    def __post_init__(self) -> None:
        for shard_id in (self.shard_id, *self.members):
            check_shard_id(shard_id)
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; known: {', '.join(CODECS)}")
        if self.codec == "none" and self.parity_members:
            raise ValueError(f"codec none with {self.parity_members} parity members; use 0")
        self._check_members()
        sizes = self.geometry
        unit = self.data_members * sizes.block_bytes
        if sizes.data_bytes % unit:
            raise ValueError(f"data_bytes {sizes.data_bytes} is not a multiple of k blocks, {unit}")
        if sizes.parity_bytes != self.parity_members * sizes.data_bytes // self.data_members:
            raise ValueError(f"parity_bytes {sizes.parity_bytes} is not data_bytes * m / k")

    def _check_members(self) -> None:
        count = len(self.members)
        if not 1 <= count <= MAX_MEMBERS:
            raise ValueError(f"{count} members; a stripe has 1 to {MAX_MEMBERS}")
        if self.data_members < 1 or self.parity_members < 0:
            raise ValueError(f"k={self.data_members}, m={self.parity_members}; use k >= 1, m >= 0")
        if self.data_members + self.parity_members != count:
            raise ValueError(f"k={self.data_members} + m={self.parity_members} is not {count}")
        if len(set(self.members)) != count:
            raise ValueError(f"members {self.members} are not all different")
        if not 0 <= self.member_index < count or self.members[self.member_index] != self.shard_id:
            raise ValueError(f"member {self.member_index} of {self.members} is not {self.shard_id}")


@dataclass(frozen=True)
class SlotHeader:
    """State of one slot, data and parity together; what is not known yet has its default.

    ``parity_root`` is the root of the parity's digest table, 32 bytes; ``stripe_table``
    has one record per stripe member in order, and is empty until the slot is protected.
    """

    state: SlotState = SlotState.FREE
    snapshot: SnapshotId | None = None
    iteration: int = -1
    local_only: bool = False
    record: SealedRecord | None = None
    parity_valid: bool = False
    parity_root: bytes = ZERO_HASH
    stripe_table: tuple[SealedRecord, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parity_root) != HASH_BYTES:
            raise ValueError(f"parity_root has {len(self.parity_root)} bytes; it has {HASH_BYTES}")
        if len(self.stripe_table) > MAX_MEMBERS:
            raise ValueError(f"stripe_table has {len(self.stripe_table)} of {MAX_MEMBERS} records")


@dataclass(frozen=True)
class Permit:
    """Leave to capture ``snapshot`` at ``iteration`` into ``slot``, unless ``revoked``.

    The trainer stays at this boundary for up to ``stay`` seconds, while the snapshot may still be
    committed.
    """

    snapshot: SnapshotId
    iteration: int
    slot: int
    revoked: bool = False
    stay: float = 0.0
