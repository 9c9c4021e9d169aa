"""Bring a stripe's rows together at their first parity holders, piece by piece.

Member x gathers row x: each of the other rows' holders of data sends it one chunk, so
every chunk travels once.  Steps are permutations (everyone sends to one member and
receives from one), and buffers are two sets of pieces whatever the data's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_ft.erasure.member import StripeCode, chunk_of, spare_pieces
from megatron_ft.erasure.transport import Kind, Link, Pending, Window
from megatron_ft.isal import Bytes

OnColumn = Callable[[int, slice, Bytes], None]
"""Called with (column, part of the chunk, bytes) when a source piece has arrived."""

OnRow = Callable[[int, slice, Sequence[Bytes]], None]
"""Called with (piece number, part of the chunk, all k columns) when a row's piece is whole."""

Passes = Callable[[int, slice], Iterable[Callable[[], Sequence[Pending]]]]
"""What else to exchange, once a piece of the row was handled; one peer each way per item."""


def gather_rows(
    link: Link,
    code: StripeCode,
    data: Bytes,
    on_column: OnColumn,
    on_row: OnRow,
    passes: Passes,
    into: Bytes | None = None,
) -> None:
    """Gather this member's row and give its own chunks to the other rows.

    The only column of a row may be received ``into`` a place of its own, a chunk long.

    The results of a piece are passed on after the next piece's first column was
    started, so that a transfer is always under way while a piece is coded.
    """
    assert into is None or code.data_members == 1
    gathering = _Gathering(link, code, data, on_column, on_row, into)
    before: tuple[int, slice] | None = None
    for number, part in enumerate(code.pieces()):
        gathering.post(number, part, 0)
        for start in passes(*before) if before else ():
            gathering.window.post(start)
        for column in range(1, code.data_members):
            gathering.post(number, part, column)
        before = number, part
    gathering.window.drain()
    for start in passes(*before) if before else ():
        gathering.window.post(start)
    gathering.window.drain()


class _Gathering:
    def __init__(
        self,
        link: Link,
        code: StripeCode,
        data: Bytes,
        on_column: OnColumn,
        on_row: OnRow,
        into: Bytes | None,
    ) -> None:
        self.window = Window(link)
        self._link, self._code, self._data = link, code, data
        self._on_column, self._on_row = on_column, on_row
        self._into = into
        spare = code.data_members if into is None else 0
        self._spare = [spare_pieces(code, spare) for _ in range(2)]

    def post(self, number: int, part: slice, column: int) -> None:
        """Exchange one column's piece: ours goes to its row, another's comes to ours."""
        link, layout = self._link, self._code.layout
        buffer = self._columns(number, part)[column]
        source = layout.holder(link.member, column)
        target = layout.data_row(link.member, column)
        mine = chunk_of(self._code, self._data, column)[part]
        self.window.post(
            lambda: [
                link.receive(buffer, source, Kind.SOURCE),
                link.send(mine, target, Kind.SOURCE),
            ],
            lambda: self._arrived(number, part, column),
        )

    def _arrived(self, number: int, part: slice, column: int) -> None:
        columns = self._columns(number, part)
        self._on_column(column, part, columns[column])
        if column == self._code.data_members - 1:
            self._on_row(number, part, columns)

    def _columns(self, number: int, part: slice) -> list[Bytes]:
        if self._into is not None:
            return [self._into[part]]
        return [piece[: part.stop - part.start] for piece in self._spare[number % 2]]
