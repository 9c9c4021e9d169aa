"""Put recomputed blocks in the place of damaged ones, but only bytes that prove to be right.

Right bytes over wrong ones can be cut off at any point: a block that is half written is
as wrong as it was.  So no state of a slot changes, and nothing is lost by trying.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megatron_ft.core.isal import Bytes
from megatron_ft.erasure.checks import (
    CorruptMemberError,
    DataCheck,
    digest_table_of,
    parity_digests_of,
    parity_root,
)
from megatron_ft.erasure.inspection import block_of
from megatron_ft.erasure.member import MemberView, StripeCode

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
