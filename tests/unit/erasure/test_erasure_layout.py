"""The rotated layout is a bijection, evenly spread."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.erasure.member import Layout
from megatron_ft.erasure.rows import buffers_apart

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
