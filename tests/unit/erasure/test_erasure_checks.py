"""Every byte of a member's data is checked where it arrives, whatever it is a part of."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ft.erasure.member import DataCheck, digest_table_of
from tests.support.erasure_samples import make_code, make_member

LENGTH = 2900
CODE = make_code("rs", 2, 1, [LENGTH, 3 * LENGTH, LENGTH], 512)
MEMBER = make_member(CODE, 0, LENGTH)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_wrong_byte_is_named_in_tensors_and_table_and_ignored_in_padding(blocks: int) -> None:
    """The table is compared with the one that was exchanged, which is right."""
    assert MEMBER.record is not None
    check = DataCheck(CODE, MEMBER.record, digest_table_of(MEMBER).copy())
    start, stop = MEMBER.record.digest_offset, MEMBER.record.used_bytes
    assert start % 512 and stop % 512 and stop < CODE.data_bytes
    places = {*range(0, CODE.data_bytes, 61), *range(start - 1, stop + 1), CODE.data_bytes - 1}
    for place in places:
        offset = place // (blocks * 512) * blocks * 512
        piece = MEMBER.data[offset : offset + blocks * 512].copy()
        assert check.bad_blocks(offset, piece) == []
        piece[place - offset] ^= 4
        if place >= stop:
            assert check.bad_blocks(offset, piece) == []
            continue
        (bad,) = check.bad_blocks(offset, piece)
        # Of what is no block of its own in the table, the first block is named.
        assert bad == place // 512 or (place >= start and bad <= place // 512)
        assert offset // 512 <= bad
        with pytest.raises(Exception, match=f"shard s0, block {bad}:"):
            check.required_digests(offset, piece)


def test_digests_of_a_piece_are_those_of_its_blocks_whatever_they_hold() -> None:
    """Where one column is all of a row, they are the digests of its parity."""
    assert MEMBER.record is not None
    check = DataCheck(CODE, MEMBER.record, digest_table_of(MEMBER).copy())
    alone = [
        check.required_digests(at, MEMBER.data[at : at + 512])
        for at in range(0, CODE.data_bytes, 512)
    ]
    assert all(one.size == 1 for one in alone)
    for blocks in (2, 3, 4):
        for at in range(0, CODE.data_bytes - blocks * 512 + 1, 512):
            found = check.required_digests(at, MEMBER.data[at : at + blocks * 512])
            assert found.tolist() == np.concatenate(alone[at // 512 :][:blocks]).tolist()
