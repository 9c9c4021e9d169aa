"""Which blocks of one member's slot are not what they were: the scrub's question, without peers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import (
    CorruptMemberError,
    DataCheck,
    digest_table_of,
    parity_digests_of,
)
from megatron_ft.erasure.member import MemberView, StripeCode


@dataclass(frozen=True)
class Damage:
    """Numbers of wrong blocks, ascending: in a slot's data region, and in its parity region.

    A parity block counts as wrong as well if its digest is.
    """

    data: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of wrong blocks."""
        return len(self.data) + len(self.parity)

    def __or__(self, other: Damage) -> Damage:
        """Blocks that are wrong in either."""
        return Damage(
            tuple(sorted({*self.data, *other.data})), tuple(sorted({*self.parity, *other.parity}))
        )


class SlotInspector:
    """Checks a sealed slot a few blocks at a time.

    Blocks are numbered through: those of the data region (padding included), then, if
    ``parity`` is set, those of the parity region.  The digest table is copied and
    checked against its root when the inspector is made; what happens to it later shows
    as a wrong block.
    """

    def __init__(self, code: StripeCode, member: MemberView, *, parity: bool) -> None:
        """The member has a record, else it has nothing to be compared with."""
        assert member.record is not None, "a slot without a record cannot be inspected"
        self._code, self._member, self._record = code, member, member.record
        self.data_blocks = code.data_bytes // code.block_bytes
        self.blocks = self.data_blocks + (code.parity_blocks if parity else 0)
        try:
            table = np.frombuffer(digest_table_of(member).tobytes(), np.uint8)
            self._check: DataCheck | None = DataCheck(code, self._record, table)
        except CorruptMemberError:
            self._check = None

    def damage(self, first: int, stop: int) -> Damage:
        """Wrong blocks among [first, stop).

        With a damaged digest table nothing is known of the data: the blocks that hold the
        table are named, and the rest once those are repaired.
        """
        edge = self.data_blocks
        data = self._bad_data(first, min(stop, edge)) if first < edge else ()
        start, end = max(first - edge, 0), stop - edge
        return Damage(data, self._bad_parity(start, end) if end > start else ())

    def _bad_data(self, first: int, stop: int) -> tuple[int, ...]:
        if self._check is None:
            return tuple(block for block in self._table_blocks() if first <= block < stop)
        size, check = self._code.block_bytes, self._check
        if not check.bad_blocks(first * size, self._member.data[first * size : stop * size]):
            return ()
        # Of wrong padding it names the first block only, so each is asked for by itself.
        data, blocks = self._member.data, range(first, stop)
        return tuple(b for b in blocks if check.bad_blocks(b * size, block_of(self._code, data, b)))

    def _table_blocks(self) -> range:
        return table_blocks(self._code, self._member)

    def _bad_parity(self, first: int, stop: int) -> tuple[int, ...]:
        size = self._code.block_bytes
        found = parity_digests_of(self._code, self._member.parity[first * size : stop * size])
        wrong = np.flatnonzero(found != self._member.parity_digests[first:stop])
        return tuple(int(block) for block in first + wrong)


def table_blocks(code: StripeCode, member: MemberView) -> range:
    """Numbers of the data blocks that hold some of the digest table."""
    record, size = member.record, code.block_bytes
    assert record is not None
    start = min(max(record.digest_offset, 0), code.data_bytes)
    stop = min(max(record.used_bytes, start), code.data_bytes)
    return range(start // size, -(-stop // size))


def block_of(code: StripeCode, region: Bytes, block: int) -> Bytes:
    """One block of a data or parity region; both are whole blocks."""
    return region[block * code.block_bytes : (block + 1) * code.block_bytes]
