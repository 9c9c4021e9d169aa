"""Digests: what is taken before a shard counts as sealed, and checked before it is used.

A data region holds tensors, then the small objects ("meta"), then a table with one
64-bit digest per block of what precedes it (docs/reference/arena-format.md).  The digest root
covers the table and the sealed record, so 32 bytes vouch for everything.  What lies behind counts
as zeros, whatever it is: nobody writes it, and nobody believes it.
Digests find accidents (memory errors, stray writes, wrong blocks), not forgery: who
can write an arena can write its digests.

The CRC of a run of blocks is computed from the blocks' own, without reading them.  A CRC of A and B
together is the CRC of A, moved on by as many zeros as B has bytes, plus (xor) the CRC of B, where
both begin with and are inverted at the end by ones, as CRC-64/XZ is.  Moving on is linear over
GF(2), so 64 single bits tell all of it; they are moved on by the CRC's own code.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Executor
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from megatron_ft.arena.arrivals import Arrivals
from megatron_ft.arena.format import HASH_BYTES, round_up
from megatron_ft.core import copy_crc, isal
from megatron_ft.core.copy_crc import CopyCrc, Words
from megatron_ft.core.errors import ArenaCorruptError, ArenaError
from megatron_ft.core.identity import SealedRecord, SnapshotId

Table = NDArray[np.uint64]


def joined_crcs(crcs: Table, block_bytes: int, run: int) -> Table:
    """CRC-64/XZ of each whole run of ``run`` neighbours, all of whose blocks have one length."""
    return _joined(crcs[: crcs.size // run * run].reshape(-1, run), block_bytes, 1)


def _joined(runs: Table, block_bytes: int, blocks: int) -> Table:
    """Join the CRCs of each row, of ``blocks`` blocks each, pair by pair until one is left."""
    if runs.shape[1] == 1:
        alone: Table = runs[:, 0].copy()
        return alone
    if runs.shape[1] % 2:
        before = _joined(runs[:, :-1], block_bytes, blocks)
        return _moved_on(before, block_bytes, blocks) ^ runs[:, -1]
    pairs = _moved_on(runs[:, ::2], block_bytes, blocks) ^ runs[:, 1::2]
    return _joined(pairs, block_bytes, 2 * blocks)


def _moved_on(crcs: Table, block_bytes: int, blocks: int) -> Table:
    """The CRCs after ``blocks`` more blocks of zeros; ``blocks`` is a power of two."""
    # Lowest byte first, as in the table.
    bytes_of = np.ascontiguousarray(crcs, "<u8").view(np.uint8).reshape(*crcs.shape, 8)
    moved = np.zeros(crcs.shape, np.uint64)
    for at, images in enumerate(_images(block_bytes, blocks)):
        moved ^= images.take(bytes_of[..., at])
    return moved


@lru_cache(maxsize=32)
def _images(block_bytes: int, blocks: int) -> Table:
    """Table of the moved CRC for each value of each byte of a CRC, lowest byte first."""
    bits, images = _bits(block_bytes, blocks).reshape(8, 8), np.zeros((8, 1), np.uint64)
    for number in range(8):
        images = np.concatenate([images, images ^ bits[:, number : number + 1]], axis=1)
    return images


@lru_cache(maxsize=32)
def _bits(block_bytes: int, blocks: int) -> Table:
    """The moved CRC of each single bit, lowest bit first."""
    if blocks > 1:
        return _moved_on(_bits(block_bytes, blocks // 2), block_bytes, blocks // 2)
    zeros, library = np.zeros(block_bytes, np.uint8), isal.load()
    nothing = library.crc64(zeros)
    return np.array([library.crc64(zeros, 1 << bit) ^ nothing for bit in range(64)], np.uint64)


ALIGNMENT = 64

POOLED_BYTES = 8 << 20
"""Bytes that one thread of a pool digests at a time."""
ENTRY_BYTES = 8

Bytes = NDArray[np.uint8]


class ArenaCapacityError(ArenaError):
    """A shard does not fit into its arena's data region: it has grown since it was planned."""


def digest_block(buffer: Bytes) -> int:
    """The 64-bit digest of one block: CRC-64/XZ."""
    return isal.crc64(buffer)


def digest_blocks(buffer: Bytes, block_bytes: int, out: Table) -> None:
    """Write the digest of every block of ``buffer`` into ``out``; the last block may be short.

    ``buffer`` is contiguous bytes; ``out`` has table_entries(len(buffer), block_bytes)
    entries, else ValueError.
    """
    entries = table_entries(buffer.size, block_bytes)
    if out.shape != (entries,):
        raise ValueError(f"{buffer.size} bytes have {entries} blocks; out has shape {out.shape}")
    isal.load().crc64_blocks(buffer, block_bytes, out)


def copy_blocks(source: Bytes, target: Bytes, block_bytes: int, out: Table) -> None:
    """Copy bytes, and write the digest of every block of what is in ``target`` into ``out``."""
    if (library := copy_crc.load()) is not None:
        return library.blocks(source, target, block_bytes, out)
    np.copyto(target, source)
    digest_blocks(target, block_bytes, out)


def table_entries(covered_bytes: int, block_bytes: int) -> int:
    """Blocks in ``covered_bytes``, a last short one included."""
    return -(-covered_bytes // block_bytes)


def required_bytes(tensor_bytes: int, meta_capacity: int, block_bytes: int) -> int:
    """Bytes that a data region needs for tensors, up to ``meta_capacity`` of meta, and the table.

    The region itself is larger: padded to whole blocks, and to its stripe's maximum.
    """
    meta_offset = round_up(tensor_bytes, ALIGNMENT)
    return _end_of_table(round_up(meta_offset + meta_capacity, ALIGNMENT), block_bytes)


def _end_of_table(digest_offset: int, block_bytes: int) -> int:
    return digest_offset + ENTRY_BYTES * table_entries(digest_offset, block_bytes)


def digest_root(table: Table, record: SealedRecord) -> bytes:
    """The root that belongs into ``record``: BLAKE2b-32 of the table (as little-endian u64) and of
    the record without a root."""
    digest = hashlib.blake2b(np.ascontiguousarray(table, dtype="<u8").data, digest_size=HASH_BYTES)
    digest.update(msgspec.msgpack.encode(_with_root(record, b"")))
    return digest.digest()


def _with_root(record: SealedRecord, root: bytes) -> SealedRecord:
    return msgspec.structs.replace(record, digest_root=root)


def seal(
    data: Bytes,
    *,
    shard_id: str,
    snapshot: SnapshotId,
    iteration: int,
    tensor_bytes: int,
    meta: bytes,
    layout_hash: bytes,
    block_bytes: int,
    arrivals: Arrivals | None = None,
    pool: Executor | None = None,
) -> SealedRecord:
    """Finish a data region whose first ``tensor_bytes`` bytes are in place.

    Writes meta, the gaps beside it and the digest table, and returns the record with its root.
    ``arrivals`` has digests of what was counted in it; all else is read, in ``pool`` if there
    is one.
    ArenaCapacityError, with nothing written, if it does not fit.
    """
    record = _plan(shard_id, snapshot, iteration, tensor_bytes, len(meta), layout_hash, block_bytes)
    if record.used_bytes > data.size:
        raise ArenaCapacityError(
            f"shard {shard_id} needs {record.used_bytes} bytes ({tensor_bytes} of tensors, "
            f"{len(meta)} of small objects, the rest digests) and its arena holds {data.size}: "
            "objects or tensors have grown since the layout was planned; plan it again"
        )
    _write_meta(data, record, meta)
    table = _table_view(data, record)
    known = np.empty(0, np.uint64), np.empty(0, np.bool_)
    if arrivals is not None:
        blocks = record.digest_offset // block_bytes
        arrivals.count(record.tensor_bytes, blocks * block_bytes)
        known = arrivals.known(blocks)
    _complete(table, data[: record.digest_offset], block_bytes, known, pool)
    return _with_root(record, digest_root(table, record))


def _complete(
    table: Table,
    data: Bytes,
    block_bytes: int,
    known: tuple[Table, NDArray[np.bool_]],
    pool: Executor | None,
) -> None:
    """Fill the table with the digests that are known to be right; take those of all others."""
    digests, right = known
    table[: digests.size] = digests
    lacking = np.ones(table.size + 2, np.bool_)
    lacking[0] = lacking[-1] = False
    lacking[1 : 1 + right.size] = ~right
    step = max(1, POOLED_BYTES // block_bytes)
    runs = np.flatnonzero(np.diff(lacking)).reshape(-1, 2).tolist()
    cuts = [(at, min(at + step, stop)) for first, stop in runs for at in range(first, stop, step)]

    def take(cut: tuple[int, int]) -> None:
        first, stop = cut
        piece = data[first * block_bytes : stop * block_bytes]
        digest_blocks(piece, block_bytes, table[first:stop])

    for _ in (map if pool is None else pool.map)(take, cuts):
        pass


def _plan(
    shard_id: str,
    snapshot: SnapshotId,
    iteration: int,
    tensor_bytes: int,
    meta_bytes: int,
    layout_hash: bytes,
    block_bytes: int,
) -> SealedRecord:
    meta_offset = round_up(tensor_bytes, ALIGNMENT)
    digest_offset = round_up(meta_offset + meta_bytes, ALIGNMENT)
    return SealedRecord(
        shard_id=shard_id,
        snapshot=snapshot,
        iteration=iteration,
        tensor_bytes=tensor_bytes,
        meta_offset=meta_offset,
        meta_bytes=meta_bytes,
        digest_offset=digest_offset,
        used_bytes=_end_of_table(digest_offset, block_bytes),
        layout_hash=layout_hash,
        digest_root=b"",
    )


def _write_meta(data: Bytes, record: SealedRecord, meta: bytes) -> None:
    meta_end = record.meta_offset + record.meta_bytes
    data[record.tensor_bytes : record.meta_offset] = 0
    data[record.meta_offset : meta_end] = np.frombuffer(meta, np.uint8)
    data[meta_end : record.digest_offset] = 0


def fits(data_bytes: int, record: SealedRecord) -> bool:
    """True if a record's lengths are in order and inside a region; it may be untrusted."""
    meta_end = record.meta_offset + record.meta_bytes
    ends = (0, record.tensor_bytes, record.meta_offset, meta_end, record.digest_offset)
    ordered = all(a <= b for a, b in zip(ends, (*ends[1:], record.used_bytes), strict=True))
    whole = (record.used_bytes - record.digest_offset) % ENTRY_BYTES == 0
    return ordered and whole and record.used_bytes <= data_bytes


def _check_fits(data: Bytes, record: SealedRecord) -> None:
    if not fits(data.size, record):
        raise ArenaCorruptError(
            f"the record of {record.shard_id} describes {record.used_bytes} bytes in an order that "
            f"a region of {data.size} bytes cannot hold"
        )


def _table_view(data: Bytes, record: SealedRecord) -> NDArray[Any]:
    return data[record.digest_offset : record.used_bytes].view("<u8")


def digest_table(data: Bytes, record: SealedRecord) -> Table:
    """A copy of the digest table, not checked yet; ArenaCorruptError if it lies outside."""
    _check_fits(data, record)
    return _table_view(data, record).astype(np.uint64)


def verify_root(data: Bytes, record: SealedRecord) -> bool:
    """True if the table in the region and the record were sealed together."""
    return fits(data.size, record) and digest_root(_table_view(data, record), record) == (
        record.digest_root
    )


class BlockCheck:
    """The digest table of a sealed region, and the blocks that it vouches for.

    Blocks may be asked about in any order and by several threads; digests are made without the
    GIL.  ``blocks``, of ``block_bytes`` each, is how many precede ``digest_offset``.
    """

    def __init__(self, data: Bytes, record: SealedRecord, block_bytes: int, run: int = 1) -> None:
        """Compares table and record with the root first; block_bytes is as it was sealed.

        Runs of ``run`` blocks, from multiples of it on, are checked in one call each: threads
        wait for the GIL between calls.
        """
        covered = min(max(record.digest_offset, 0), data.size)
        self.blocks = table_entries(covered, block_bytes)
        self._data, self.block_bytes = data[:covered], block_bytes
        # A copy, so that nobody changes it after the root has proved it.
        table = digest_table(data, record) if fits(data.size, record) else None
        sealed = table is not None and digest_root(table, record) == record.digest_root
        self._table = table if sealed and table is not None and table.size == self.blocks else None
        self._run, self._runs = run, np.empty(0, np.uint64)
        if run > 1 and self._table is not None:
            self._runs = joined_crcs(self._table[: covered // block_bytes], block_bytes, run)

    def copy(self, library: CopyCrc, first: int, stop: int, parts: Words, ends: Words) -> list[int]:
        """As ``bad``, and makes the copies out of blocks that are right, as the library does."""
        if self._table is None:
            return self.bad(first, stop)
        piece = self._data[first * self.block_bytes : stop * self.block_bytes]
        table = self._table[first:stop]
        return [first + n for n in library.verified(piece, self.block_bytes, table, parts, ends)]

    def bounce(self, first: int, stop: int, buffer: Bytes) -> list[int]:
        """As ``bad``, of the copy that it makes in ``buffer``, which may be longer."""
        if self._table is None:
            return self.bad(first, stop)
        piece = self._data[first * self.block_bytes : stop * self.block_bytes]
        expected = self._table[first:stop]
        found = np.empty_like(expected)
        copy_blocks(piece, buffer[: piece.size], self.block_bytes, found)
        return [first + int(number) for number in np.flatnonzero(found != expected)]

    def bad(self, first: int, stop: int) -> list[int]:
        """Numbers of the blocks from ``first`` to before ``stop`` without the sealed bytes.

        With a wrong root nothing is known of any block, so every block is named, at least one.
        """
        if self._table is None:
            return list(range(first, max(stop, first + 1)))
        piece = self._data[first * self.block_bytes : stop * self.block_bytes]
        number, rest = divmod(first, self._run)
        if not rest and stop - first == self._run and number < self._runs.size:
            if isal.crc64(piece) == self._runs[number]:
                return []
        return wrong_blocks(piece, first, self._table[first:stop], self.block_bytes)


def wrong_blocks(piece: Bytes, first: int, expected: Table, block_bytes: int) -> list[int]:
    """Numbers of the blocks of ``piece``, whose first one is number ``first``, that are wrong."""
    found = np.empty_like(expected)
    digest_blocks(piece, block_bytes, found)
    return [first + int(number) for number in np.flatnonzero(found != expected)]


def verify_shard(data: Bytes, record: SealedRecord, block_bytes: int) -> list[int]:
    """Numbers of the blocks before ``digest_offset`` whose bytes are not the sealed ones.

    Empty means that every byte up to ``used_bytes`` is as sealed.  With a wrong root
    nothing is known of any block, so every block is named, at least block 0.
    """
    check = BlockCheck(data, record, block_bytes)
    return check.bad(0, check.blocks)


def first_meta_block(record: SealedRecord, block_bytes: int) -> int:
    """The first of the blocks that hold small objects."""
    return max(record.meta_offset, 0) // block_bytes


def name_blocks(bad: list[int]) -> str:
    """Numbers of bad blocks for a message, the first 16 of them."""
    return ", ".join(map(str, bad[:16])) + (", ..." if len(bad) > 16 else "")


def read_meta(data: Bytes, record: SealedRecord) -> bytes:
    """A copy of the small objects' bytes; verify the shard first.  ArenaCorruptError if outside."""
    _check_fits(data, record)
    return data[record.meta_offset : record.meta_offset + record.meta_bytes].tobytes()
