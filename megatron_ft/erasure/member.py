"""One stripe's numbers, its layout, one member's bytes, and whether a block of them is right.

A stripe has N = k + m members.  Every member cuts its data into k chunks and keeps
m chunks of parity; the stripe has N rows.  Row r keeps parity j on member r + j and
data column i on member r + m + i, all modulo N.  So chunk i of *every* member is
column i of the one generator matrix, and every member holds data in k rows and
parity in m rows: memory, work and traffic are even.  The layout is our own.

Every block is checked against the digest taken when its shard was sealed before it is coded or
used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.digest import digest_blocks, digest_root
from megatron_ft.arena.format import ArenaHeader, SlotHeader
from megatron_ft.core.errors import CorruptBlockError
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.codec import Codec, open_codec


@dataclass(frozen=True)
class Layout:
    """The layout of one stripe with k data and m parity symbols in each row.

    A symbol is a place in a row: 0 to k-1 are data columns, k to k+m-1 parities.
    """

    data_members: int
    parity_members: int

    @property
    def members(self) -> int:
        """N, which is also the number of rows."""
        return self.data_members + self.parity_members

    def symbol(self, row: int, member: int) -> int:
        """The symbol of ``row`` that ``member`` keeps."""
        distance = (member - row) % self.members
        if distance < self.parity_members:
            return self.data_members + distance
        return distance - self.parity_members

    def holder(self, row: int, symbol: int) -> int:
        """The member that keeps ``symbol`` of ``row``."""
        if symbol < self.data_members:
            return (row + self.parity_members + symbol) % self.members
        return (row + symbol - self.data_members) % self.members

    def data_row(self, member: int, chunk: int) -> int:
        """The row in which the member's data chunk is coded, always as column ``chunk``."""
        return (member - self.parity_members - chunk) % self.members

    def parity_row(self, member: int, chunk: int) -> int:
        """The row whose parity ``chunk`` the member keeps, as its parity chunk ``chunk``."""
        return (member - chunk) % self.members

    def is_parity(self, symbol: int) -> bool:
        """True if the symbol is a parity."""
        return symbol >= self.data_members

    def chunk(self, symbol: int) -> int:
        """The chunk of the holder's data, or of its parity, in which the symbol lies."""
        return symbol - self.data_members if self.is_parity(symbol) else symbol


def code_of(header: ArenaHeader) -> StripeCode:
    """The stripe's numbers as the arena stores them."""
    return StripeCode(
        kind=header.codec,
        data_members=header.data_members,
        parity_members=header.parity_members,
        data_bytes=header.geometry.data_bytes,
        block_bytes=header.geometry.block_bytes,
    )


def member_of(
    arena: Arena, slot: int, header: SlotHeader, *, data: bool = False, parity: bool = False
) -> MemberView:
    """A slot's regions with the record and roots of ``header``, which proves them.

    Data and parity are read-only unless asked for.
    """
    return MemberView(
        data=arena.data(slot, writable=data),
        parity=arena.parity(slot, writable=parity),
        parity_digests=arena.parity_digests(slot, writable=parity),
        record=header.record,
        parity_root=header.parity_root,
        stripe_table=header.stripe_table,
    )


Digests = npt.NDArray[np.uint64]

PIECE_BYTES = 1 << 20
"""Chunks travel and are coded in pieces of about this size, so that a piece stays in cache."""


@dataclass(frozen=True)
class StripeCode:
    """The numbers that all members of a stripe agree on.

    ``data_bytes`` is the padded length of every member's data, a multiple of
    data_members x block_bytes (ValueError otherwise), so chunks are whole blocks.
    """

    kind: str
    data_members: int
    parity_members: int
    data_bytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        """Refuse lengths that do not divide."""
        unit = self.data_members * self.block_bytes
        if unit <= 0 or self.data_bytes < 0 or self.data_bytes % unit:
            raise ValueError(
                f"{self.data_bytes} bytes of data cannot be cut into {self.data_members} chunks "
                f"of whole blocks of {self.block_bytes} bytes"
            )

    @cached_property
    def members(self) -> int:
        """N."""
        return self.data_members + self.parity_members

    @cached_property
    def layout(self) -> Layout:
        """Layout of the stripe's chunks."""
        return Layout(self.data_members, self.parity_members)

    @property
    def copies_only(self) -> bool:
        """True if parities of a row equal its only column, which arrives in parity 0's place."""
        return self.kind in ("xor", "replica") and self.data_members == 1

    def codec(self) -> Codec:
        """The codec of the stripe's rows."""
        return open_codec(self.kind, self.data_members, self.parity_members)

    @cached_property
    def chunk_bytes(self) -> int:
        """Length of one chunk of data or parity."""
        return self.data_bytes // self.data_members

    @cached_property
    def chunk_blocks(self) -> int:
        """Digests of one chunk."""
        return self.chunk_bytes // self.block_bytes

    @property
    def parity_bytes(self) -> int:
        """Length of one member's parity."""
        return self.parity_members * self.chunk_bytes

    @property
    def parity_blocks(self) -> int:
        """Digests of one member's parity."""
        return self.parity_members * self.chunk_blocks

    @cached_property
    def piece_bytes(self) -> int:
        """Length of all pieces of a chunk but the last: whole blocks."""
        return max(1, PIECE_BYTES // self.block_bytes) * self.block_bytes

    @property
    def small_piece_bytes(self) -> int:
        """About half a piece: what rebuilding solves at a time, since nobody sends before that."""
        return max(1, self.piece_bytes // 2 // self.block_bytes) * self.block_bytes

    def pieces(self, length: int = 0) -> Iterator[slice]:
        """The parts of a chunk, in order; of ``length`` bytes, 0 for ``piece_bytes``."""
        step = length or self.piece_bytes
        for start in range(0, self.chunk_bytes, step):
            yield slice(start, min(start + step, self.chunk_bytes))

    def blocks(self, part: slice) -> slice:
        """The blocks that a part of whole blocks covers."""
        return slice(part.start // self.block_bytes, part.stop // self.block_bytes)


@dataclass(frozen=True)
class MemberView:
    """One member's slot, as arrays over shared memory.

    ``data`` has data_bytes (the record's used_bytes, then padding), ``parity``
    parity_members x chunk bytes, ``parity_digests`` one number per block of parity.
    ``record`` is None for a member that has lost its bytes.  ``parity_root`` and
    ``stripe_table`` are what the member stored when the stripe was protected; rebuild
    and verify need them.
    """

    data: Bytes
    parity: Bytes
    parity_digests: Digests
    record: SealedRecord | None
    parity_root: bytes = b""
    stripe_table: tuple[SealedRecord, ...] = ()

    def require_fit(self, code: StripeCode) -> None:
        """ValueError if a length is not what the code says."""
        lengths = (self.data.nbytes, self.parity.nbytes, self.parity_digests.size)
        wanted = (code.data_bytes, code.parity_bytes, code.parity_blocks)
        if lengths != wanted:
            raise ValueError(
                "a member has (data bytes, parity bytes, parity digests) of "
                f"{lengths}, the stripe's code says {wanted}"
            )


def chunk_of(code: StripeCode, region: Bytes, chunk: int) -> Bytes:
    """One chunk of a member's data or parity."""
    return region[chunk * code.chunk_bytes : (chunk + 1) * code.chunk_bytes]


def piece_of(code: StripeCode, view: MemberView, member: int, row: int, part: slice) -> Bytes:
    """A member's symbol of a row, cut to ``part`` of the chunk."""
    symbol = code.layout.symbol(row, member)
    region = view.parity if code.layout.is_parity(symbol) else view.data
    return chunk_of(code, region, code.layout.chunk(symbol))[part]


class CorruptMemberError(CorruptBlockError):
    """A member's bytes, digest table or record are wrong; that member counts as lost.

    ``shard_id`` names it; ``block`` is the block's number in its data or parity region,
    or None if a whole table is wrong.
    """

    def __init__(self, shard_id: str, what: str, block: int | None = None) -> None:
        """``what`` continues the sentence that begins with the shard's name."""
        place = "" if block is None else f", block {block}"
        super().__init__(
            f"shard {shard_id}{place}: {what}; it counts as lost and must be rebuilt from the "
            "other members of its stripe"
        )
        self.shard_id, self.block = shard_id, block


class Check:
    """Looks for wrong blocks in one region of one member."""

    def __init__(self, code: StripeCode, shard_id: str, wrong: str) -> None:
        """``wrong`` says what a wrong block is."""
        self._code, self._shard_id, self._wrong = code, shard_id, wrong

    def bad_blocks(self, offset: int, piece: Bytes) -> list[int]:
        """Numbers of the wrong blocks of whole blocks of bytes that lie at ``offset``."""
        raise NotImplementedError

    def expected(self, offset: int, piece: Bytes) -> Digests:
        """The digests that whole blocks of bytes at ``offset`` must have.

        What no digest is known of is compared here, and then digested: CorruptMemberError.
        """
        raise NotImplementedError

    def require(self, offset: int, piece: Bytes) -> None:
        """CorruptMemberError naming the first wrong block, if there is one."""
        self._refuse(self.bad_blocks(offset, piece))

    def _refuse(self, bad: list[int]) -> None:
        for block in bad:
            raise CorruptMemberError(self._shard_id, self._wrong, block)


class DataCheck(Check):
    """A shard's data against its digest table, which is first checked against its root.

    Bytes of the table itself are compared with the table that was exchanged.  Padding behind it
    is not looked at, and coded as zeros.
    """

    def __init__(self, code: StripeCode, record: SealedRecord, table: Bytes) -> None:
        """CorruptMemberError if table and record do not belong together."""
        wrong = "its data does not match the digest taken at capture"
        super().__init__(code, record.shard_id, wrong)
        self._record, self._bytes = record, table
        blocks = -(-record.digest_offset // code.block_bytes)
        if not 0 <= record.digest_offset <= record.used_bytes <= code.data_bytes:
            raise CorruptMemberError(record.shard_id, f"its record has impossible lengths {record}")
        if table.nbytes != record.used_bytes - record.digest_offset or table.nbytes != 8 * blocks:
            raise CorruptMemberError(record.shard_id, "its digest table has the wrong length")
        self._table = table.view("<u8")
        if digest_root(self._table, record) != record.digest_root:
            raise CorruptMemberError(record.shard_id, "its digest table does not match its root")

    def bad_blocks(self, offset: int, piece: Bytes) -> list[int]:
        """See Check."""
        return self._bad(offset, piece, self._found(offset, piece))

    def coded(self, offset: int, piece: Bytes, spare: Bytes) -> Bytes:
        """The piece at ``offset`` as it is coded: in ``spare`` if some of it is padding.

        ``spare`` is as long as the piece, and may be the piece itself.
        """
        used = _clip(self._record.used_bytes - offset, piece)
        if used == piece.nbytes:
            return piece
        if spare is not piece:
            spare[:used] = piece[:used]
        spare[used:] = 0
        return spare

    def expected(self, offset: int, piece: Bytes) -> Digests:
        """See Check; padding must be zeros, as ``coded`` makes them."""
        size = self._code.block_bytes
        first, whole = offset // size, self._covered(offset, piece) // size
        known: Digests = self._table[first : first + whole].astype(np.uint64)
        if whole * size == piece.nbytes:
            return known
        rest = self.required_digests(offset + whole * size, piece[whole * size :])
        return np.concatenate([known, rest])

    def required_digests(self, offset: int, piece: Bytes) -> Digests:
        """Like ``require``; returns the digests of the piece's blocks, which must be whole.

        What the check itself has digested is not read again: only the block that the data shares
        with the table, and those behind it.
        """
        found = self._found(offset, piece)
        self._refuse(self._bad(offset, piece, found))
        whole = self._covered(offset, piece) // self._code.block_bytes
        rest = _digests(self._code, piece[whole * self._code.block_bytes :])
        return np.concatenate([found[:whole], rest])

    def _covered(self, offset: int, piece: Bytes) -> int:
        return _clip(self._record.digest_offset - offset, piece)

    def _found(self, offset: int, piece: Bytes) -> Digests:
        return _digests(self._code, piece[: self._covered(offset, piece)])

    def _bad(self, offset: int, piece: Bytes, found: Digests) -> list[int]:
        first, covered = offset // self._code.block_bytes, self._covered(offset, piece)
        bad = _differing(found, self._table[first : first + found.size], first)
        if self._table_matches(offset, piece, covered):
            return bad
        return sorted({*bad, (offset + covered) // self._code.block_bytes})

    def _table_matches(self, offset: int, piece: Bytes, covered: int) -> bool:
        in_table = _clip(self._record.used_bytes - offset, piece)
        start = offset + covered - self._record.digest_offset
        part = self._bytes[start : start + in_table - covered] if in_table > covered else ()
        return np.array_equal(piece[covered:in_table], part)


class ParityCheck(Check):
    """A member's parity against the digests that were taken when it was computed."""

    def __init__(self, code: StripeCode, shard_id: str, digests: Digests, root: bytes) -> None:
        """CorruptMemberError if the digests do not match their root."""
        super().__init__(code, shard_id, "its parity does not match its digest")
        self._digests = digests
        if digests.size != code.parity_blocks or parity_root(digests) != root:
            raise CorruptMemberError(shard_id, "its parity digests do not match their root")

    def bad_blocks(self, offset: int, piece: Bytes) -> list[int]:
        """See Check."""
        first = offset // self._code.block_bytes
        return _differing(_digests(self._code, piece), self.expected(offset, piece), first)

    def expected(self, offset: int, piece: Bytes) -> Digests:
        """See Check."""
        first = offset // self._code.block_bytes
        return self._digests[first : first + _blocks(self._code, piece.nbytes)]


def parity_root(digests: Digests) -> bytes:
    """BLAKE2b-32 over the parity's digests as little-endian 64-bit numbers."""
    return hashlib.blake2b(digests.astype("<u8").tobytes(), digest_size=32).digest()


def digest_table_of(member: MemberView) -> Bytes:
    """The digest table inside a member's data; empty if the record cannot be right."""
    record = member.record
    assert record is not None, "a lost member has no digest table"
    return member.data[max(record.digest_offset, 0) : max(record.used_bytes, 0)]


def parity_digests_of(code: StripeCode, parity: Bytes) -> Digests:
    """Digests of the parity as it is in memory now."""
    return _digests(code, parity)


def _digests(code: StripeCode, piece: Bytes) -> Digests:
    out = np.zeros(_blocks(code, piece.nbytes), np.uint64)
    if piece.nbytes:
        digest_blocks(piece, code.block_bytes, out)
    return out


def _differing(found: Digests, wanted: Digests, first: int) -> list[int]:
    """Numbers of blocks whose digests differ; there are almost never any."""
    if found.tobytes() == wanted.tobytes():
        return []
    return [first + int(place) for place in np.flatnonzero(found != wanted)]


def _blocks(code: StripeCode, length: int) -> int:
    return -(-length // code.block_bytes)


def _clip(length: int, piece: Bytes) -> int:
    return max(0, min(length, piece.nbytes))
