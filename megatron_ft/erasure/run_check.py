"""A whole piece against its blocks' digests, by one CRC where it is right.

A call for each block takes a third of the time of digesting a piece that has just arrived.  What
the CRCs of pieces must be costs numpy some steps first, which only a chunk of many pieces pays for.
"""

from __future__ import annotations

from megatron_ft.arena.digest import digest_block
from megatron_ft.arena.format import DIGEST_CRC64
from megatron_ft.arena.joined_crc import joined_crcs
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import Digests, StripeCode


class RunCheck:
    """Knows the CRC of every piece that has so many whole blocks as a power of two."""

    def __init__(self, code: StripeCode, table: Digests) -> None:
        """``table`` has the digests of the first blocks of a member's data, each of a whole one."""
        self._code, self._table = code, table
        self._known: dict[tuple[int, int], Digests] = {}

    def is_right(self, offset: int, piece: Bytes) -> bool:
        """Whether all blocks of the piece at ``offset`` are right; False as well where unknown.

        Pieces are counted from their chunk's beginning.
        """
        run, part = divmod(piece.nbytes, self._code.block_bytes)
        chunk, within = divmod(offset, self._code.chunk_bytes)
        if part or run < 2 or run & (run - 1) or within % piece.nbytes:
            return False
        if self._code.digest_algorithm != DIGEST_CRC64:
            return False
        crcs, number = self._crcs(chunk, run), within // piece.nbytes
        return number < crcs.size and digest_block(piece, DIGEST_CRC64) == int(crcs[number])

    def _crcs(self, chunk: int, run: int) -> Digests:
        """Of a chunk's pieces of ``run`` blocks, as far as the table goes."""
        if (chunk, run) not in self._known:
            blocks = self._code.chunk_blocks
            table = self._table[chunk * blocks : (chunk + 1) * blocks]
            self._known[chunk, run] = joined_crcs(table, self._code.block_bytes, run)
        return self._known[chunk, run]
