"""One stripe's numbers, and one member's bytes, as encode, rebuild and verify take them.

Where each chunk of a stripe lies: the rotated layout.

A stripe has N = k + m members.  Every member cuts its data into k chunks and keeps
m chunks of parity; the stripe has N rows.  Row r keeps parity j on member r + j and
data column i on member r + m + i, all modulo N.  So chunk i of *every* member is
column i of the one generator matrix, and every member holds data in k rows and
parity in m rows: memory, work and traffic are even.  The layout is our own.

An arena's slot as a stripe member's bytes, by what the arena's own header says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ft.arena.arena import Arena
from megatron_ft.arena.format import ArenaHeader, SlotHeader
from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes


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
        """What ``member`` keeps of ``row``."""
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
        """Whether the symbol is a parity."""
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
        digest_algorithm=header.digest_algorithm,
    )


def member_of(arena: Arena, slot: int, header: SlotHeader, *, writable: bool = False) -> MemberView:
    """A slot's regions with the record and roots of ``header``, which proves them."""
    return MemberView(
        data=arena.data(slot, writable=writable),
        parity=arena.parity(slot, writable=writable),
        parity_digests=arena.parity_digests(slot, writable=writable),
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
    digest_algorithm: int

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
        """Where the chunks lie."""
        return Layout(self.data_members, self.parity_members)

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

    ``data`` has data_bytes (zero after the record's used_bytes), ``parity``
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
