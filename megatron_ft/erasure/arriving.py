"""Check a rebuilt member while it arrives, so that its memory is not read once more afterwards."""

from __future__ import annotations

import numpy as np

from megatron_ft.arena.digest import digest_block, digest_table, tail_is_zero, verify_root
from megatron_ft.core.identity import SealedRecord
from megatron_ft.erasure.checks import CorruptMemberError, parity_digests_of
from megatron_ft.erasure.member import Digests, MemberView, StripeCode, chunk_of


class ArrivingMember:
    """Digests of a lost member's blocks, each taken where it lies, when its piece had arrived.

    What should be there is known only at the end: the table is in the last blocks of the data.
    """

    def __init__(self, code: StripeCode, member: MemberView) -> None:
        """Nothing has arrived yet; 8 bytes are kept for each block."""
        self._code, self._member = code, member
        self._data: Digests = np.zeros(code.data_members * code.chunk_blocks, np.uint64)
        self._parity: Digests = np.zeros(code.parity_blocks, np.uint64)

    def arrived(self, symbol: int, part: slice) -> None:
        """This part of the chunk that the member keeps as ``symbol`` of a row is in its memory."""
        code, member = self._code, self._member
        chunk, in_parity = code.layout.chunk(symbol), code.layout.is_parity(symbol)
        region, digests = (member.parity, self._parity) if in_parity else (member.data, self._data)
        blocks, first = code.blocks(part), chunk * code.chunk_blocks
        found = parity_digests_of(code, chunk_of(code, region, chunk)[part])
        digests[first + blocks.start : first + blocks.stop] = found

    def require(self, record: SealedRecord) -> None:
        """All has arrived: CorruptMemberError if a byte is not what ``record`` or a solver says."""
        wrong = self._wrong_data(record)
        if wrong is not None:
            raise CorruptMemberError(
                record.shard_id, "its rebuilt data does not match the stripe's table", wrong
            )
        parity = np.flatnonzero(self._parity != self._member.parity_digests)
        if parity.size:
            raise CorruptMemberError(
                record.shard_id, "its rebuilt parity is not what was computed", int(parity[0])
            )

    def _wrong_data(self, record: SealedRecord) -> int | None:
        """The first wrong block; the table, and the zeros behind it, are read only now."""
        data, size = self._member.data, self._code.block_bytes
        if not verify_root(data, record):
            return 0
        found = self._data[: -(-record.digest_offset // size)].copy()
        if record.digest_offset % size:  # the last block is shared with the table
            last = data[record.digest_offset // size * size : record.digest_offset]
            found[-1] = digest_block(last, self._code.digest_algorithm)
        bad = np.flatnonzero(found != digest_table(data, record))
        if bad.size:
            return int(bad[0])
        return None if tail_is_zero(data, record) else record.used_bytes // size
