"""The rotated layout is an even bijection, and every byte is checked where it arrives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.erasure.member import DataCheck, Layout, digest_table_of
from megatron_ft.erasure.rows import buffers_apart
from tests.support.erasure_samples import make_code, make_member

layouts = st.builds(Layout, st.integers(1, 12), st.integers(1, 6))


@given(layouts)
def test_every_row_has_each_symbol_once_and_each_member_once(layout: Layout) -> None:
    for row in range(layout.members):
        holders = [layout.holder(row, symbol) for symbol in range(layout.members)]
        assert sorted(holders) == list(range(layout.members))
        assert [layout.symbol(row, member) for member in holders] == list(range(layout.members))


@given(layouts)
def test_every_chunk_lies_in_one_row_as_its_own_column(layout: Layout) -> None:
    for member in range(layout.members):
        rows = set()
        for chunk in range(layout.data_members):
            row = layout.data_row(member, chunk)
            assert layout.symbol(row, member) == chunk == layout.chunk(chunk)
            rows.add(row)
        for chunk in range(layout.parity_members):
            row, symbol = layout.parity_row(member, chunk), layout.data_members + chunk
            assert layout.symbol(row, member) == symbol and layout.is_parity(symbol)
            assert layout.chunk(symbol) == chunk
            rows.add(row)
        assert rows == set(range(layout.members))


@given(layouts)
def test_all_members_hold_as_much_parity(layout: Layout) -> None:
    parities = Counter(
        layout.holder(row, layout.data_members + parity)
        for row in range(layout.members)
        for parity in range(layout.parity_members)
    )
    assert set(parities.values()) == {layout.parity_members}


def test_the_worked_example_of_the_docs() -> None:
    """rs:2+1, three members: the table in docs/explanation/erasure-coding.md."""
    layout = Layout(2, 1)
    table = [[layout.symbol(row, member) for member in range(3)] for row in range(3)]
    assert table == [[2, 0, 1], [1, 2, 0], [0, 1, 2]]


def test_buffers_do_not_share_places_in_their_pages() -> None:
    buffers = buffers_apart(20, 1 << 20)
    assert all(buffer.nbytes == 1 << 20 for buffer in buffers)
    assert all(buffer.ctypes.data % 64 == 0 for buffer in buffers)
    assert len({buffer.ctypes.data % 4096 for buffer in buffers}) == 20
    for number, buffer in enumerate(buffers):
        buffer[:] = number
    assert [int(buffer.sum()) >> 20 for buffer in buffers] == list(range(20))


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
