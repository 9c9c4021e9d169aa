"""Put recomputed blocks in the place of damaged ones, but only bytes that prove to be right.

Right bytes over wrong ones can be cut off at any point: a block that is half written is
as wrong as it was.  So no state of a slot changes, and nothing is lost by trying.

Which blocks of one member's slot are not what they were: the scrub's question, without peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import (
    CorruptMemberError,
    DataCheck,
    digest_table_of,
    parity_digests_of,
    parity_root,
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


Blocks = Mapping[int, Bytes]
"""Block numbers, and the whole blocks that belong there."""


def mend_data(code: StripeCode, member: MemberView, blocks: Blocks) -> bool:
    """Write blocks into the member's data region; False, with nothing written, if one is wrong.

    What proves them is the digest table as it will be with them, which the root in the slot's
    header proves in turn: all damaged blocks of the table itself must be among them.
    """
    assert member.record is not None, "nothing says what the blocks should be"
    if not _are_whole(code, blocks, code.data_bytes):
        return False
    try:
        check = DataCheck(code, member.record, _table_with(code, member, blocks))
    except CorruptMemberError:
        return False
    if any(check.bad_blocks(number * code.block_bytes, raw) for number, raw in blocks.items()):
        return False
    for number, raw in blocks.items():
        block_of(code, member.data, number)[:] = raw
    return True


def mend_parity(code: StripeCode, member: MemberView, blocks: Blocks) -> bool:
    """Write blocks of parity and their digests; False, with nothing written, if one is wrong.

    The root in the slot's header proves all digests together, so every damaged one must be
    among the blocks.
    """
    if not _are_whole(code, blocks, code.parity_bytes):
        return False
    digests = member.parity_digests.copy()
    for number, raw in blocks.items():
        digests[number] = parity_digests_of(code, raw)[0]
    if parity_root(digests) != member.parity_root:
        return False
    for number, raw in blocks.items():
        block_of(code, member.parity, number)[:] = raw
    member.parity_digests[:] = digests
    return True


def _are_whole(code: StripeCode, blocks: Blocks, region_bytes: int) -> bool:
    """Whether all are blocks inside the region, whoever sent them."""
    count = region_bytes // code.block_bytes
    return all(0 <= n < count and raw.nbytes == code.block_bytes for n, raw in blocks.items())


def _table_with(code: StripeCode, member: MemberView, blocks: Blocks) -> Bytes:
    """The member's digest table as it will be once the blocks are written."""
    assert member.record is not None
    table = digest_table_of(member).copy()
    start, stop, size = member.record.digest_offset, member.record.used_bytes, code.block_bytes
    for number, raw in blocks.items():
        low, high = max(number * size, start), min((number + 1) * size, stop)
        if low < high:
            table[low - start : high - start] = raw[low - number * size : high - number * size]
    return np.ascontiguousarray(table)
