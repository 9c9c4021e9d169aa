"""One stripe's numbers, and one member's bytes, as encode, rebuild and verify take them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ft.core.identity import SealedRecord
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.layout import Layout

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
