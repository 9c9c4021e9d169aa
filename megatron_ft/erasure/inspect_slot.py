"""Finds wrong blocks of a sealed slot without peers: bytes that do not match their digests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ft.erasure.member import (
    CorruptMemberError,
    DataCheck,
    MemberView,
    StripeCode,
    digest_table_of,
    parity_digests_of,
)


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

    Blocks are numbered through: those of the data region with used bytes, then, if
    ``parity`` is set, those of the parity region.  The digest table is copied and
    checked against its root when the inspector is made; what happens to it later shows
    as a wrong block.
    """

    def __init__(self, code: StripeCode, member: MemberView, *, parity: bool) -> None:
        """Take a member with a record, to which its data is compared."""
        assert member.record is not None, "a slot without a record cannot be inspected"
        self._code, self._member, self._record = code, member, member.record
        used = min(max(self._record.used_bytes, 0), code.data_bytes)
        self.data_blocks = -(-used // code.block_bytes)
        self.blocks = self.data_blocks + (code.parity_blocks if parity else 0)
        try:
            table = np.frombuffer(digest_table_of(member).tobytes(), np.uint8)
            self._check: DataCheck | None = DataCheck(code, self._record, table)
        except CorruptMemberError:
            self._check = None

    def damage(self, first: int, stop: int) -> Damage:
        """Wrong blocks among [first, stop).

        With a damaged digest table nothing is known of the data: the blocks that hold the
        table are named.
        """
        edge = self.data_blocks
        data = self._bad_data(first, min(stop, edge)) if first < edge else ()
        start, end = max(first - edge, 0), stop - edge
        return Damage(data, self._bad_parity(start, end) if end > start else ())

    def _bad_data(self, first: int, stop: int) -> tuple[int, ...]:
        if self._check is None:
            return tuple(block for block in self._table_blocks() if first <= block < stop)
        size, data, check = self._code.block_bytes, self._member.data, self._check
        return tuple(check.bad_blocks(first * size, data[first * size : stop * size]))

    def _table_blocks(self) -> range:
        """Numbers of the data blocks that hold some of the digest table."""
        size, end = self._code.block_bytes, self._code.data_bytes
        start = min(max(self._record.digest_offset, 0), end)
        stop = min(max(self._record.used_bytes, start), end)
        return range(start // size, -(-stop // size))

    def _bad_parity(self, first: int, stop: int) -> tuple[int, ...]:
        size = self._code.block_bytes
        found = parity_digests_of(self._code, self._member.parity[first * size : stop * size])
        wrong = np.flatnonzero(found != self._member.parity_digests[first:stop])
        return tuple(int(block) for block in first + wrong)
