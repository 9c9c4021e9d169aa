"""Pieces of a row, checked together: the digest of their sum is the sum of their digests.

CRC-64 is linear over GF(2) but for its inversions, which leave the CRC of zeros where the pieces
are even in number.  All sums are XORs.  So one digest, of what was computed, checks all k sources,
whose digests are known.  Where it differs a source is wrong; they are still there then, and are
looked at one by one for the shard to be named.

Two sources that are wrong by the same bits add up to the right sum.  For `xor` the result is right
then, too; for `rs` their bytes would have to be wrong by the same bits in the same place at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ft.arena.digest import digest_block
from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.member import Check, Digests, StripeCode, parity_digests_of
from megatron_ft.erasure.rows import SparePieces


class SumCheck:
    """Computes symbols of a row, and refuses wrong sources by their sum."""

    def __init__(self, code: StripeCode, spare: SparePieces) -> None:
        """``spare`` has the place of a sum that is no symbol."""
        self._code, self._codec = code, code.codec()
        (self._sum,) = spare.sets(1, 1 if code.kind == "rs" else 0)
        zeros = digest_block(np.zeros(code.block_bytes, np.uint8))
        self._even = np.uint64(0 if code.data_members % 2 else zeros)

    @classmethod
    def of(cls, code: StripeCode, spare: SparePieces) -> SumCheck | None:
        """None where it takes longer than the digests of all sources: a sum costs about two."""
        worth = code.data_members > (2 if code.kind == "rs" else 1)
        return cls(code, spare) if worth else None

    def compute(
        self,
        wanted: Sequence[int],
        given: Sequence[int],
        pieces: Sequence[Bytes],
        outputs: Sequence[Bytes],
        checks: Sequence[tuple[Check, int]],
    ) -> Digests | None:
        """Compute ``wanted`` symbols from the ``given`` ones; CorruptMemberError names a wrong one.

        ``checks`` are those of the given pieces, with the offset of each in what it checks.
        Returns the digests of the first output where that is the sum.
        """
        total = outputs[0]
        if self._sum:
            total = self._sum[0][: total.nbytes]
            outputs = [*outputs, total]
        self._codec.kernel(wanted, given, with_sum=bool(self._sum))(pieces, outputs)
        expected = np.full(self._code.blocks(slice(0, total.nbytes)).stop, self._even)
        for (check, offset), piece in zip(checks, pieces, strict=True):
            expected ^= check.expected(offset, piece)
        found = parity_digests_of(self._code, total)
        if found.tobytes() != expected.tobytes():
            for (check, offset), piece in zip(checks, pieces, strict=True):
                check.require(offset, piece)
            raise RuntimeError(
                "the sources of a row are right and their sum is not: memory or processor of this "
                "node computes wrong values; take it out of service"
            )
        return None if self._sum else found
